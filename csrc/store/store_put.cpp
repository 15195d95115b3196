// store_put.cpp: the store line, from arrays to files.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <stdexcept>

#include <mlx/transforms.h>

#include "gather/copy.h"
#include "hash/checksum.h"
#include "layout/check_header.h"
#include "store/common_rows.h"
#include "store/store_impl.h"

namespace prefixcache::store {

namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("[BlockStore::put] " + what);
}

void check_slot(const SlotInput& slot, const PutRequest& request) {
  if (slot.seq_axis == kNoSeqAxis) return;
  const auto rank = static_cast<int>(slot.array.ndim());
  if (slot.seq_axis < 0 || slot.seq_axis >= rank) {
    refuse("slot '" + slot.name + "' has seq_axis " + std::to_string(slot.seq_axis) + " and rank " +
           std::to_string(rank));
  }
  const std::int64_t rows = slot.array.shape(slot.seq_axis);
  if (slot.first_row > request.row_lo || request.row_hi - slot.first_row > rows) {
    refuse("slot '" + slot.name + "' has rows " + std::to_string(slot.first_row) + ".." +
           std::to_string(slot.first_row + rows) + ", asked for " + std::to_string(request.row_lo) + ".." +
           std::to_string(request.row_hi));
  }
}

void check(const PutRequest& request) {
  if (request.row_lo < 0 || request.row_lo > request.row_hi || request.row_hi > request.depth) {
    refuse("rows " + std::to_string(request.row_lo) + ".." + std::to_string(request.row_hi) +
           " do not lie in a block that ends at " + std::to_string(request.depth));
  }
  if (request.slots.empty() && request.part != Part::kv) refuse("only a part 'kv' may be without slots");
  for (const auto& slot : request.slots) check_slot(slot, request);
}

void evaluate(std::span<const SlotInput> slots) {
  std::vector<mlx::core::array> pending;
  for (const auto& slot : slots) {
    if (!slot.array.is_available()) pending.push_back(slot.array);
  }
  if (!pending.empty()) mlx::core::eval(std::move(pending));
}

std::shared_ptr<Image> make_image(const PutRequest& request) {
  auto image = std::make_shared<Image>();
  auto& header = image->header;
  header.key = request.key;
  header.parent = request.parent;
  header.depth = request.depth;
  header.part = request.part;
  header.row_lo = request.row_lo;
  header.row_hi = request.row_hi;
  header.tokens.assign(request.tokens.begin(), request.tokens.end());
  header.content.assign(request.content.begin(), request.content.end());
  header.meta = request.meta;
  for (const auto& slot : request.slots) {
    layout::TensorInfo tensor;
    tensor.name = slot.name;
    tensor.dtype = slot.array.dtype();
    tensor.shape = slot.array.shape();
    tensor.seq_axis = slot.seq_axis;
    if (slot.seq_axis != kNoSeqAxis) {
      tensor.shape[slot.seq_axis] = static_cast<mlx::core::ShapeElem>(request.row_hi - request.row_lo);
    }
    header.tensors.push_back(std::move(tensor));
  }
  image->block = group_key(request.key, request.group);  // its own inverse
  image->data_bytes = layout::place_tensors(header.tensors);
  std::uint64_t data_bytes = 0;
  if (const std::string why = layout::why_invalid(header, data_bytes); !why.empty()) refuse(why);
  return image;
}

void copy_rows(const PutRequest& request, const Image& image, gather::ThreadPool& threads) {
  if (image.data_bytes == 0) return;
  // Pieces small enough to share between threads, large enough that the sharing costs nothing.
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  struct Piece {
    std::size_t slot, outer_lo, outer_hi;
  };
  std::vector<gather::RowCopy> copies;
  std::vector<Piece> pieces;
  for (const auto& slot : request.slots) {
    copies.emplace_back(slot.array, slot.seq_axis, request.row_lo - slot.first_row, request.row_hi - slot.first_row);
    const auto& copy = copies.back();
    const std::size_t step = std::max<std::size_t>(1, kPiece / std::max<std::size_t>(1, copy.strip_bytes()));
    for (std::size_t lo = 0; lo < copy.outer(); lo += step) {
      pieces.push_back({copies.size() - 1, lo, std::min(copy.outer(), lo + step)});
    }
  }
  threads.parallel_for(pieces.size(), [&](std::size_t i) {
    const Piece& piece = pieces[i];
    std::uint8_t* to = image.buffer->data() + image.header.tensors[piece.slot].offset;
    copies[piece.slot].run(to, piece.outer_lo, piece.outer_hi);
  });
}

// Bytes reserved in the writer's queue, given back unless a job takes them.
class Reservation {
 public:
  Reservation(Writer* writer, std::uint64_t bytes) : writer_(writer), bytes_(bytes) {}
  ~Reservation() {
    if (writer_ != nullptr) writer_->cancel(bytes_);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  void release() { writer_ = nullptr; }

 private:
  Writer* writer_;
  std::uint64_t bytes_;
};

// While it lives, the writer stands back.
class Copying {
 public:
  explicit Copying(Writer* writer) : writer_(writer) {
    if (writer_ != nullptr) writer_->copying_begins();
  }
  ~Copying() {
    if (writer_ != nullptr) writer_->copying_ends();
  }
  Copying(const Copying&) = delete;
  Copying& operator=(const Copying&) = delete;

 private:
  Writer* writer_;
};

}  // namespace

Status StoreImpl::put(const PutRequest& base, std::uint64_t* added) {
  check(base);
  if (added != nullptr) *added = 0;
  PutRequest request = base;
  request.key = group_key(base.key, base.group);
  request.parent = group_key(base.parent, base.group);
  if (closed_) return {StatusCode::Closed, "the store is closed"};
  find_unless_known(request);
  if (already_there(request)) return Status::ok();
  evaluate(request.slots);
  const auto image = make_image(request);
  const std::uint64_t cost = image->memory();
  const bool to_disk = writer_ != nullptr;
  const auto full = [&](const std::string& why) {
    Lock lock(mutex_);
    ++stats_.put_full;
    return Status{StatusCode::Full, why};
  };
  if (to_disk && !writer_->reserve(cost, options_.put_wait_seconds)) return full("the write queue is full");
  Reservation reservation{to_disk ? writer_.get() : nullptr, cost};
  if (cost != 0) image->buffer = acquire_buffer(*image);
  if (cost != 0 && image->buffer == nullptr)
    return full("no memory for a part of " + std::to_string(image->data_bytes) + " bytes");
  {
    const Copying copying(writer_.get());
    copy_rows(request, *image, threads_);
  }
  if (!insert(request, image, to_disk)) {
    return closed_ ? Status{StatusCode::Closed, "the store is closed"} : Status::ok();
  }
  reservation.release();
  if (to_disk) writer_->push(image, cost);
  if (added != nullptr) *added = image->data_bytes;
  return Status::ok();
}

namespace {

// Whether all of rows [lo, hi) are in the part. Unknown rows are those of a file whose name says that they are.
bool covers(const PartRecord& record, std::int64_t lo, std::int64_t hi) {
  return record.row_lo < 0 || (record.row_lo <= lo && record.row_hi >= hi);
}

}  // namespace

void StoreImpl::find_unless_known(const PutRequest& request) {
  // Another process may have stored it, and more rows of it than are offered here.
  {
    Lock lock(mutex_);
    if (const PartRecord* record = index_.find(request.key, request.part); record != nullptr && record->row_lo >= 0)
      return;
  }
  find_on_disk(request.key, request.parent, request.depth, request.part);
  std::int64_t lo = 0;
  std::int64_t hi = 0;
  if (request.part == Part::win) rows_of(request.key, request.part, lo, hi);
}

bool StoreImpl::already_there(const PutRequest& request) {
  Lock lock(mutex_);
  const PartRecord* record = index_.find(request.key, request.part);
  const bool there =
      record != nullptr ? covers(*record, request.row_lo, request.row_hi) : contained_in_sibling(request);
  if (there) ++stats_.put_existing;
  return there;
}

bool StoreImpl::contained_in_sibling(const PutRequest& request) const {
  if (request.part == Part::state) return false;
  for (const Entry* sibling : index_.children(layout::parent_prefix(request.parent))) {
    const PartRecord* record = sibling->parts[static_cast<int>(request.part)].get();
    if (record == nullptr || sibling->text == nullptr) continue;
    if (request.part == Part::win && !covers(*record, request.row_lo, request.row_hi)) continue;
    if (!sibling->parent_known || sibling->parent != request.parent) continue;
    const BlockText& text = *sibling->text;
    if (begins_with(text.tokens, text.content, request.tokens, request.content, request.depth)) return true;
  }
  return false;
}

std::vector<PartRecord*> StoreImpl::superseded_by(const PutRequest& request) const {
  std::vector<PartRecord*> records;
  if (request.part == Part::state) return records;
  for (Entry* sibling : index_.children(layout::parent_prefix(request.parent))) {
    PartRecord* record = sibling->parts[static_cast<int>(request.part)].get();
    if (record == nullptr || sibling->text == nullptr || sibling->depth >= request.depth) continue;
    if (request.part == Part::win && (record->row_lo < request.row_lo || record->row_hi > request.row_hi)) continue;
    if (!sibling->parent_known || sibling->parent != request.parent) continue;
    const BlockText& text = *sibling->text;
    if (begins_with(request.tokens, request.content, text.tokens, text.content, sibling->depth)) {
      records.push_back(record);
    }
  }
  return records;
}

void StoreImpl::remove_superseded(const PutRequest& request) {
  std::lock_guard names_lock(names_mutex_);
  std::vector<FileToRemove> files;
  {
    Lock lock(mutex_);
    for (PartRecord* record : superseded_by(request)) drop(*record, files);
  }
  remove_files(files);
}

std::shared_ptr<Buffer> StoreImpl::acquire_buffer(const Image& image) {
  const std::uint64_t bytes = image.data_bytes;
  const bool fits = BufferPool::rounded(bytes) <= pool_->limit();
  if (!fits) return writer_ ? queue_pool_->acquire(bytes) : nullptr;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(options_.put_wait_seconds);
  for (;;) {
    if (auto buffer = pool_->acquire(bytes)) return buffer;
    if (evict_one_from_ram(image)) continue;
    const auto deadline = std::chrono::time_point_cast<std::chrono::steady_clock::duration>(until);
    if (writer_ == nullptr || !writer_->wait_one(deadline)) return nullptr;
  }
}

PartRecord* StoreImpl::victim_for(const Image& newcomer, const std::list<PartRecord*>& order) {
  // Nobody would find the newcomer without the blocks before it, so they stay.
  const auto& header = newcomer.header;
  const bool is_kv = header.part == Part::kv;
  PartRecord* parent = is_kv ? nullptr : index_.find(newcomer.block, Part::kv);
  if (parent == nullptr) parent = index_.find(header.parent, Part::kv);
  const bool begins_chain = header.depth == static_cast<std::int64_t>(header.tokens.size());
  if (parent == nullptr && !begins_chain && is_kv) return nullptr;
  NeededParts needed(index_, newcomer, asked_for_);
  const auto oldest = [&]() -> PartRecord* {
    const auto found = std::find_if(order.rbegin(), order.rend(),
                                    [&](const auto* record) { return !record->waiting && !needed.has(*record); });
    return found == order.rend() ? nullptr : *found;
  };
  PartRecord* victim = oldest();
  if (victim != nullptr && victim == parent) {
    index_.touch(*parent);
    victim = oldest();
  }
  return victim == parent ? nullptr : victim;
}

bool StoreImpl::evict_one_from_ram(const Image& newcomer) {
  // Its memory goes back to the pool when the last gather that reads it ends.
  std::shared_ptr<Image> image;
  Lock lock(mutex_);
  const auto& order = index_.ram_order();
  PartRecord* victim = victim_for(newcomer, order);
  if (victim == nullptr) {
    // What is on the disk too may leave the RAM whoever needs it.
    const auto found = std::find_if(order.rbegin(), order.rend(),
                                    [](const auto* record) { return !record->waiting && record->on_disk; });
    if (found == order.rend()) return false;
    victim = *found;
  }
  ++stats_.evicted_ram_parts;
  image = victim->image;
  victim->forget_image();
  index_.remove_from_ram(*victim);
  if (!victim->on_disk) index_.remove(*victim);
  lock.unlock();
  return true;
}

bool StoreImpl::insert(const PutRequest& request, const std::shared_ptr<Image>& image, bool to_disk) {
  Lock lock(mutex_);
  if (closed_) return false;
  Entry& entry = index_.entry(request.key, layout::parent_prefix(request.parent), request.depth);
  PartRecord& record = index_.part(entry, request.part);
  // Another thread may have put the same rows meanwhile.
  if ((record.image || record.on_disk) && record.row_lo <= request.row_lo && record.row_hi >= request.row_hi) {
    ++stats_.put_existing;
    return false;
  }
  index_.set_parent(entry, request.parent);
  if (entry.text == nullptr) {
    entry.text = std::make_shared<BlockText>(BlockText{image->header.tokens, image->header.content});
  }
  record.row_lo = request.row_lo;
  record.row_hi = request.row_hi;
  index_.renew(record);
  record.image = image;
  record.file.reset();
  record.file_is_older = record.on_disk;
  record.waiting = to_disk;
  if (pool_->limit() != 0 && image->memory() <= pool_->limit()) index_.add_to_ram(record);
  ++stats_.put_parts;
  stats_.put_bytes += image->data_bytes;
  const bool supersedes = !superseded_by(request).empty();
  lock.unlock();
  if (supersedes) remove_superseded(request);
  return true;
}

Status StoreImpl::write_image(const std::shared_ptr<Image>& image) {
  {
    // Erased before its turn came.
    Lock lock(mutex_);
    const PartRecord* record = index_.find(image->header.key, image->header.part);
    if (record == nullptr || record->image != image) return Status::ok();
  }
  Status status;
  std::string temp;
  std::uint64_t file_bytes = 0;
  try {
    status = write_file(*image, temp, file_bytes);
  } catch (const std::exception& e) {
    // No memory, say. On this thread it would end the process.
    status = {StatusCode::IOError, std::string("cannot write a part: ") + e.what(), ENOMEM};
  }
  {
    std::lock_guard names_lock(names_mutex_);
    const auto& header = image->header;
    const layout::NameInfo name{header.key, layout::parent_prefix(header.parent), header.depth, header.part};
    if (status.is_ok()) status = directory_->publish(temp, name, file_bytes);
    remove_files(finish_write(image, status, file_bytes));
  }
  return status;
}

Status StoreImpl::write_file(Image& image, std::string& temp, std::uint64_t& file_bytes) {
  const auto data = image.data();
  for (auto& tensor : image.header.tensors) tensor.digest = hash::xxh3_64(data.subspan(tensor.offset, tensor.nbytes));
  const std::string header = layout::encode_header(image.header);
  file_bytes = header.size() + data.size();
  if (Status status = make_disk_room(image, file_bytes); !status.is_ok()) return status;
  const std::span<const std::uint8_t> pieces[] = {{reinterpret_cast<const std::uint8_t*>(header.data()), header.size()},
                                                  data};
  const auto& h = image.header;
  return directory_->write({h.key, layout::parent_prefix(h.parent), h.depth, h.part}, pieces, temp);
}

Status StoreImpl::make_disk_room(const Image& newcomer, std::uint64_t bytes) {
  const Status full{StatusCode::Full, "a part of " + std::to_string(bytes) + " bytes at depth " +
                                          std::to_string(newcomer.header.depth) + " does not fit below disk_bytes " +
                                          std::to_string(options_.disk_bytes)};
  if (bytes > options_.disk_bytes) return full;
  while (directory_->used() + bytes > options_.disk_bytes) {
    if (directory_->evict_foreign()) continue;
    std::lock_guard names_lock(names_mutex_);
    std::vector<FileToRemove> files;
    {
      Lock lock(mutex_);
      PartRecord* victim = victim_for(newcomer, index_.disk_order());
      if (victim == nullptr) return full;
      ++stats_.evicted_disk_parts;
      files.push_back({name_of(*victim), victim->file_bytes});
      victim->on_disk = false;
      victim->file.reset();
      index_.remove_from_disk(*victim);
      if (victim->image == nullptr) index_.remove(*victim);
    }
    if (Status status = remove_files(files); !status.is_ok()) return status;
  }
  return Status::ok();
}

std::vector<StoreImpl::FileToRemove> StoreImpl::finish_write(const std::shared_ptr<Image>& image, const Status& status,
                                                             std::uint64_t file_bytes) {
  std::vector<FileToRemove> files;
  {
    Lock lock(mutex_);
    const auto& header = image->header;
    PartRecord* record = index_.find(header.key, header.part);
    const bool wanted = record != nullptr && record->image == image;
    if (status.is_ok()) {
      stats_.degraded = false;
      ++stats_.written_parts;
      stats_.written_bytes += file_bytes;
    } else {
      // A bound that was reached is no fault of the disk.
      if (status.code() != StatusCode::Full) stats_.degraded = true;
      ++stats_.write_errors;
      stats_.last_error = status.message();
    }
    if (status.is_ok() && !wanted) {
      // Erased while it was being written. If it was put again meanwhile, that write is still to come.
      files.push_back({{header.key, layout::parent_prefix(header.parent), header.depth, header.part}, file_bytes});
    }
    if (wanted) {
      record->waiting = false;
      if (status.is_ok()) {
        // A narrower part that it took the place of.
        if (record->on_disk) directory_->count_less(record->file_bytes);
        record->on_disk = true;
        record->file_is_older = false;
        record->file_bytes = file_bytes;
        index_.add_to_disk(*record);
      }
      if (!record->in_ram_order) record->forget_image();
      if (!record->image && !record->on_disk) index_.remove(*record);
    }
  }
  return files;
}

}  // namespace prefixcache::store
