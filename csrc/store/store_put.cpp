// store_put.cpp: the store line, from arrays to files.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <stdexcept>

#include <mlx/transforms.h>

#include "arrays/shared_array.h"
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
    if (!is_evaluated(slot.array)) pending.push_back(slot.array);
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

void StoreImpl::watch_writer() {
  if (!disk_rests() && writer_->seconds_at_work() > options_.disk_wait_seconds) disk_failed(no_answer());
}

Status StoreImpl::put_full(const std::string& why) {
  Lock lock(mutex_);
  ++stats_.put_full;
  return {StatusCode::Full, why};
}

Status StoreImpl::put(const PutRequest& base, std::uint64_t* added) {
  check(base);
  if (added != nullptr) *added = 0;
  PutRequest request = base;
  request.key = group_key(base.key, base.group);
  request.parent = group_key(base.parent, base.group);
  if (closed_) return {StatusCode::Closed, "the store is closed"};
  try {
    return put_checked(request, added);
  } catch (const std::bad_alloc&) {
    return put_full("no memory");
  }
}

Status StoreImpl::put_checked(const PutRequest& request, std::uint64_t* added) {
  find_unless_known(request);
  if (already_there(request)) return Status::ok();
  evaluate(request.slots);
  const auto image = make_image(request);
  image->form = form_of(image->header);
  const std::uint64_t cost = image->memory();
  if (writer_ != nullptr) watch_writer();
  const bool queued = writer_ != nullptr && !written_later(*image);
  if (queued && !writer_->reserve(cost, options_.put_wait_seconds)) return put_full("the write queue is full");
  Reservation reservation{queued ? writer_.get() : nullptr, cost};
  if (cost != 0) image->buffer = acquire_buffer(*image);
  if (cost != 0 && image->buffer == nullptr)
    return put_full("no memory for a part of " + std::to_string(image->data_bytes) + " bytes");
  {
    const Copying copying(writer_.get());
    copy_rows(request, *image, threads_);
  }
  if (!insert(request, image, queued)) {
    return closed_ ? Status{StatusCode::Closed, "the store is closed"} : Status::ok();
  }
  reservation.release();
  if (queued) {
    writer_->push(image, cost);
  } else if (writer_ != nullptr && !written_later(*image)) {
    queue_unwritten();  // the disk came back meanwhile
  }
  if (added != nullptr) *added = image->data_bytes;
  prepare_device(image);
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

const std::deque<Entry*>& StoreImpl::siblings_of(const PutRequest& request) const {
  // One that begins as it does, or the reverse, has its first token.
  const std::uint64_t prefix = layout::parent_prefix(request.parent);
  return request.tokens.empty() ? index_.children(prefix) : index_.children(prefix, request.tokens[0]);
}

bool StoreImpl::contained_in_sibling(const PutRequest& request) const {
  if (request.part == Part::state) return false;
  for (const Entry* sibling : siblings_of(request)) {
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
  for (Entry* sibling : siblings_of(request)) {
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

bool StoreImpl::insert(const PutRequest& request, const std::shared_ptr<Image>& image, bool queued) {
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
  index_.set_text(entry, {image->header.tokens, image->header.content});
  record.row_lo = request.row_lo;
  record.row_hi = request.row_hi;
  index_.renew(record);
  record.image = image;
  record.file.reset();
  record.file_is_older = record.on_disk;
  record.waiting = queued;
  record.unwritten = !queued && writer_ != nullptr;
  record.leaving = false;
  record.used_at = env_.now();
  if (pool_->limit() != 0 && image->memory() <= pool_->limit()) index_.add_to_ram(record);
  ++stats_.put_parts;
  stats_.put_bytes += image->data_bytes;
  std::vector<Key> superseded;
  for (const PartRecord* shorter : superseded_by(request)) superseded.push_back(shorter->entry->key);
  lock.unlock();
  if (superseded.empty()) return true;
  const auto remove = [this, superseded, parts = std::vector<Part>{request.part}] {
    return erase_now(superseded, parts);
  };
  ask_disk<Status>(remove, no_answer());
  return true;
}

}  // namespace prefixcache::store
