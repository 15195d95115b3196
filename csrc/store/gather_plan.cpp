#include "store/gather_plan.h"

#include <algorithm>
#include <mutex>

#include "arrays/mlx_compat.h"
#include "gather/cpu.h"
#include "gather/fault_guard.h"
#include "gather/huge_pages.h"
#include "hash/checksum.h"

namespace prefixcache::store {

namespace {

std::size_t find_tensor(const layout::PartHeader& header, const std::string& name, std::size_t guess) {
  const auto& tensors = header.tensors;
  if (guess < tensors.size() && tensors[guess].name == name) return guess;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].name == name) return i;
  }
  return tensors.size();
}

bool same_but_rows(const layout::TensorInfo& a, const layout::TensorInfo& b) {
  if (a.dtype != b.dtype || a.seq_axis != b.seq_axis || a.shape.size() != b.shape.size()) return false;
  for (std::size_t d = 0; d < a.shape.size(); ++d) {
    if (static_cast<int>(d) != a.seq_axis && a.shape[d] != b.shape[d]) return false;
  }
  return true;
}

// Axes of length 0 count as 1: MLX multiplies the others for the strides.
bool addressable(const mlx::core::Shape& shape, mlx::core::Dtype dtype) {
  auto bytes = static_cast<std::int64_t>(mlx::core::size_of(dtype));
  return std::none_of(shape.begin(), shape.end(), [&](auto extent) {
    return __builtin_mul_overflow(bytes, std::max<std::int64_t>(extent, 1), &bytes);
  });
}

}  // namespace

Status GatherPlan::make(const GatherRequest& request, std::span<const Source> sources, GatherPlan& out,
                        std::size_t& bad_block) {
  out.sources_ = sources;
  out.block_bytes_.assign(sources.size(), 0);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::string* form = sources[i].form();
    out.like_last_.push_back(i != 0 && form != nullptr && form == sources[i - 1].form());
  }
  if (Status status = out.plan_rows(request, bad_block); !status.is_ok()) return status;
  std::vector<std::string> names = request.slots;
  if (names.empty()) {
    for (const auto& tensor : sources.front().header().tensors) names.push_back(tensor.name);
    for (std::size_t i = 1; i < sources.size(); ++i) {
      if (sources[i].header().tensors.size() == names.size()) continue;
      bad_block = i;
      return {StatusCode::Corrupt, "block " + std::to_string(i) + " has other slots than the blocks before it"};
    }
  }
  for (const auto& name : names) {
    if (Status status = out.add_slot(request, name, bad_block); !status.is_ok()) return status;
  }
  return out.check_room();
}

Status GatherPlan::check_room() const {
  // A file may claim one huge row; room for thousands of them is not for it to ask.
  constexpr std::uint64_t kMostRoom = std::uint64_t{4} << 30;
  std::uint64_t rows_bytes = 0;
  std::uint64_t room_bytes = 0;
  for (const auto& slot : slots_) {
    std::uint64_t bytes = 0;
    const auto spare = static_cast<std::uint64_t>(slot.capacity - slot.rows);
    if (!addressable(slot.shape, slot.dtype) || __builtin_mul_overflow(slot.outer * slot.row_bytes, spare, &bytes) ||
        __builtin_add_overflow(room_bytes, bytes, &room_bytes)) {
      return {StatusCode::Full, "the room asked for is more than can be addressed"};
    }
    rows_bytes += slot.outer * slot.row_bytes * static_cast<std::uint64_t>(slot.rows);
  }
  if (room_bytes <= kMostRoom || room_bytes / 4 <= rows_bytes) return Status::ok();
  return {StatusCode::Full,
          "room of " + std::to_string(room_bytes) + " bytes for rows of " + std::to_string(rows_bytes)};
}

Status GatherPlan::plan_rows(const GatherRequest& request, std::size_t& bad_block) {
  std::int64_t next = -1;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    const auto& header = sources_[i].header();
    const bool follows = next < 0 ? header.row_lo <= request.row_lo : header.row_lo == next;
    if (!follows) {
      bad_block = i;
      return {StatusCode::NotFound, "block " + std::to_string(i) + " has rows from " + std::to_string(header.row_lo) +
                                        ", needed from " + std::to_string(next < 0 ? request.row_lo : next)};
    }
    next = header.row_hi;
    BlockRows rows;
    rows.first = header.row_lo;
    rows.count = header.row_hi - header.row_lo;
    rows.take_lo = std::clamp<std::int64_t>(request.row_lo - rows.first, 0, rows.count);
    rows.take_hi = std::clamp<std::int64_t>(request.row_hi - rows.first, rows.take_lo, rows.count);
    rows.place = rows.first + rows.take_lo - request.row_lo;
    blocks_.push_back(rows);
  }
  if (next < request.row_hi) {
    bad_block = sources_.size() - 1;
    return {StatusCode::NotFound, "the last block has rows up to " + std::to_string(next) + ", needed up to " +
                                      std::to_string(request.row_hi)};
  }
  return Status::ok();
}

Status GatherPlan::add_slot(const GatherRequest& request, const std::string& name, std::size_t& bad_block) {
  const auto& first = sources_.front().header();
  const std::size_t in_first = find_tensor(first, name, slots_.size());
  if (in_first == first.tensors.size()) {
    bad_block = 0;
    return {StatusCode::NotFound, "no slot '" + name + "' is stored"};
  }
  const auto& tensor = first.tensors[in_first];
  Slot slot;
  slot.name = name;
  slot.dtype = tensor.dtype;
  slot.shape = tensor.shape;
  slot.seq_axis = tensor.seq_axis;
  slot.row_bytes = mlx::core::size_of(tensor.dtype);
  for (std::size_t d = 0; d < slot.shape.size(); ++d) {
    const auto extent = static_cast<std::size_t>(slot.shape[d]);
    if (static_cast<int>(d) < slot.seq_axis) slot.outer *= extent;
    if (static_cast<int>(d) > slot.seq_axis) slot.row_bytes *= extent;
  }
  if (slot.seq_axis != kNoSeqAxis) {
    slot.capacity = request.capacity;
    slot.rows = request.row_hi - request.row_lo;
    slot.shape[slot.seq_axis] = static_cast<mlx::core::ShapeElem>(request.capacity);
  }
  slot.tensors.reserve(sources_.size());
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (like_last_[i]) {
      slot.tensors.push_back(slot.tensors.back());
    } else {
      const auto& header = sources_[i].header();
      const std::size_t found = find_tensor(header, name, in_first);
      if (found == header.tensors.size() || !same_but_rows(header.tensors[found], tensor)) {
        bad_block = i;
        return {StatusCode::Corrupt, "block " + std::to_string(i) + " holds slot '" + name + "' in another form"};
      }
      slot.tensors.push_back(found);
    }
    const bool whole = slot.seq_axis == kNoSeqAxis;
    const auto rows = static_cast<std::uint64_t>(blocks_[i].take_hi - blocks_[i].take_lo);
    if (!whole) block_bytes_[i] += rows * slot.outer * slot.row_bytes;
    if (whole && i + 1 == sources_.size()) block_bytes_[i] += slot.row_bytes;
  }
  slots_.push_back(std::move(slot));
  return Status::ok();
}

Status GatherPlan::allocate() {
  arrays_.resize(slots_.size());
  const auto why = why_no_memory([&] {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (arrays_[i]) continue;
      Slot& slot = slots_[i];
      arrays_[i] = make_uninitialised(slot.shape, slot.dtype);
      // There may be no buffer that could be asked.
      if (arrays_[i]->nbytes() == 0) continue;
      slot.data = arrays_[i]->data<std::uint8_t>();
      gather::advise_huge_pages(slot.data, arrays_[i]->nbytes());
      by_cpu_.push_back(i);
    }
  });
  return why ? Status{StatusCode::Full, *why} : Status::ok();
}

std::vector<Status> GatherPlan::run(gather::ThreadPool& threads, Verify verify) {
  std::vector<Status> results(blocks_.size());
  std::mutex mutex;
  const auto copy_one = [&](std::size_t slot, std::size_t block) {
    Status status = copy(slots_[slot], block, verify);
    if (status.is_ok()) return;
    std::lock_guard lock(mutex);
    results[block] = std::move(status);
  };
  std::vector<std::size_t> from_disk;
  std::vector<std::size_t> in_memory;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto& file = sources_[i].file;
    (file != nullptr && !file->in_memory() ? from_disk : in_memory).push_back(i);
  }
  // A disk is fastest with files that are read from their beginning to their end; all threads are to have something.
  const std::size_t slots = by_cpu_.size();
  const std::size_t files = std::max<std::size_t>(from_disk.size(), 1);
  const std::size_t pieces = std::min((static_cast<std::size_t>(threads.threads()) + files - 1) / files, slots);
  const auto read_piece = [&](std::size_t block, std::size_t piece) {
    const PartFile::InOrder in_order(*sources_[block].file);
    const auto order = in_file_order(block);
    for (std::size_t i = slots * piece / pieces; i < slots * (piece + 1) / pieces; ++i) copy_one(order[i], block);
  };
  const std::size_t reads = from_disk.size() * pieces;
  const std::size_t copies = in_memory.size() * slots;
  threads.parallel_for(reads + copies + slots, [&](std::size_t i) {
    if (i < reads) return read_piece(from_disk[i / pieces], i % pieces);
    i -= reads;
    if (i >= copies) return clear_spare_rows(slots_[by_cpu_[i - copies]]);
    // Diagonally: threads side by side work on different arrays, so that they do not both fault on (and clear) one huge
    // page, and on different files, whose pages they map.
    const std::size_t slot = i % slots;
    copy_one(by_cpu_[slot], in_memory[(i / slots + slot) % in_memory.size()]);
  });
  return results;
}

std::vector<std::size_t> GatherPlan::in_file_order(std::size_t block) const {
  const auto& tensors = sources_[block].header().tensors;
  const auto place = [&](std::size_t slot) { return tensors[slots_[slot].tensors[block]].offset; };
  std::vector<std::size_t> order(by_cpu_);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return place(a) < place(b); });
  return order;
}

Status GatherPlan::copy(const Slot& slot, std::size_t block, Verify verify) const {
  // Arrays without rows are exact only at the end of the last block.
  const bool last = block + 1 == blocks_.size();
  if (slot.seq_axis == kNoSeqAxis && !last) return Status::ok();
  const Source& source = sources_[block];
  const std::size_t index = slot.tensors[block];
  const auto& tensor = source.header().tensors[index];
  if (source.image)
    return copy_bytes(slot, block, source.image->data().subspan(tensor.offset, tensor.nbytes), {}, false);

  PartFile& file = *source.file;
  const bool check = verify == Verify::always || (verify == Verify::first && !file.verified(index));
  const std::uint64_t offset = file.data_offset() + tensor.offset;
  Status status;
  if (!file.mapping().empty()) {
    file.bring_in(index);
    status = copy_bytes(slot, block, file.mapping().subspan(offset, tensor.nbytes), file.mapping(), check);
  } else {
    std::vector<std::uint8_t> bytes(tensor.nbytes);
    status = file.read(offset, bytes);
    if (status.is_ok()) status = copy_bytes(slot, block, bytes, {}, check);
  }
  if (status.is_ok() && check) file.set_verified(index);
  return status;
}

Status GatherPlan::copy_bytes(const Slot& slot, std::size_t block, std::span<const std::uint8_t> tensor,
                              std::span<const std::uint8_t> guarded, bool check) const {
  const BlockRows& rows = blocks_[block];
  const bool whole = slot.seq_axis == kNoSeqAxis;
  gather::StripCopy strips;
  strips.from = tensor.data();
  strips.from_stride = whole ? slot.row_bytes : static_cast<std::size_t>(rows.count) * slot.row_bytes;
  strips.skip = whole ? 0 : static_cast<std::size_t>(rows.take_lo) * slot.row_bytes;
  strips.size = whole ? strips.from_stride : static_cast<std::size_t>(rows.take_hi) * slot.row_bytes - strips.skip;
  strips.to = slot.data + (whole ? 0 : static_cast<std::size_t>(rows.place) * slot.row_bytes);
  strips.to_stride = static_cast<std::size_t>(slot.capacity) * slot.row_bytes;
  // Where there are no bytes, a file may claim any number of strips.
  strips.strips = strips.from_stride == 0 ? 0 : slot.outer;

  hash::Xxh3Stream sum;
  const auto body = [&] { check ? gather::copy_strips_and_sum(strips, sum) : gather::copy_strips(strips); };
  bool intact = true;
  if (guarded.empty()) {
    body();
  } else {
    intact = gather::run_guarded(guarded, body);
  }
  if (!intact) return {StatusCode::IOError, "a mapped file shrank or failed while it was read"};
  const auto& info = sources_[block].header().tensors[slot.tensors[block]];
  if (check && sum.digest() != info.digest) {
    return {StatusCode::Corrupt, "the checksum of slot '" + slot.name + "' does not match"};
  }
  return Status::ok();
}

void GatherPlan::clear_spare_rows(const Slot& slot) {
  const auto spare = static_cast<std::size_t>(slot.capacity - slot.rows) * slot.row_bytes;
  if (slot.seq_axis == kNoSeqAxis || spare == 0) return;
  const std::size_t out_strip = static_cast<std::size_t>(slot.capacity) * slot.row_bytes;
  gather::clear_strips(slot.data + out_strip - spare, slot.outer, out_strip, spare);
}

std::vector<GatheredSlot> GatherPlan::take_results() {
  std::vector<GatheredSlot> results;
  results.reserve(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    results.push_back({slots_[i].name, slots_[i].seq_axis, *std::move(arrays_[i])});
  }
  arrays_.clear();
  return results;
}

}  // namespace prefixcache::store
