// device_plan.cpp: the part of a plan that a GPU carries out: rows that lie in slabs of its memory, gathered by a
// kernel.
#include <algorithm>
#include <map>
#include <stdexcept>
#include <tuple>

#include <mlx/transforms.h>

#include "arrays/mlx_compat.h"
#include "gather/device.h"
#include "store/gather_plan.h"

namespace prefixcache::store {

bool GatherPlan::find_slabs(std::vector<mlx::core::array>& slabs, gather::KernelRequest& request) const {
  std::vector<const Slab*> known;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    const Image* image = sources_[i].image.get();
    const BlockRows& rows = blocks_[i];
    if (image == nullptr) return false;
    if (rows.take_hi == rows.take_lo) continue;
    const Slab* slab = image->buffer == nullptr ? nullptr : image->buffer->slab().get();
    if (slab == nullptr) return false;
    const auto found = std::find(known.begin(), known.end(), slab);
    const auto number = static_cast<std::size_t>(found - known.begin());
    if (found == known.end()) {
      known.push_back(slab);
      slabs.push_back(slab->memory);
      request.slab_bytes.push_back(slab->bytes);
    }
    request.pieces.push_back(
        {number, image->buffer->offset(), image->data_bytes, 0, rows.count, rows.take_lo, rows.take_hi, rows.place});
  }
  return !slabs.empty();
}

gather::KernelRequest GatherPlan::request_for(const gather::KernelRequest& base,
                                              std::span<const std::size_t> slots) const {
  gather::KernelRequest request = base;
  const Slot& first = slots_[slots.front()];
  request.heads = first.outer;
  request.row_bytes = first.row_bytes;
  request.rows = first.rows;
  request.capacity = first.capacity;
  request.tensors.assign(slots.size(), {{}, first.dtype});
  std::vector<std::vector<std::uint64_t>> layouts;
  const std::string* last = nullptr;
  auto piece = request.pieces.begin();
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (blocks_[i].take_hi == blocks_[i].take_lo) continue;
    // Blocks of one length follow each other.
    const std::string* form = sources_[i].form();
    if (form == nullptr || form != last) {
      std::vector<std::uint64_t> offsets;
      offsets.reserve(slots.size());
      const auto& tensors = sources_[i].header().tensors;
      for (const std::size_t slot : slots) offsets.push_back(tensors[slots_[slot].tensors[i]].offset);
      layouts.push_back(std::move(offsets));
      last = form;
    }
    (piece++)->layout = layouts.size() - 1;
  }
  for (const auto& offsets : layouts) {
    for (std::size_t t = 0; t < slots.size(); ++t) request.tensors[t].offsets.push_back(offsets[t]);
  }
  return request;
}

std::optional<std::string> GatherPlan::start(const gather::DeviceGather& device, const gather::KernelRequest& request,
                                             std::span<const mlx::core::array> slabs,
                                             std::span<const std::size_t> slots) {
  std::vector<mlx::core::Shape> shapes;
  for (const std::size_t slot : slots) shapes.push_back(slots_[slot].shape);
  std::vector<mlx::core::array> made;
  try {
    // No memory, no stream of this thread's, no compiler: the CPU's copy may still find what it needs.
    if (auto why = why_no_memory([&] { made = device.start(request, slabs, shapes); })) return why;
  } catch (const std::invalid_argument& e) {
    // More than a launch can do.
    return e.what();
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const Slot& slot = slots_[slots[i]];
    arrays_[slots[i]] = std::move(made[i]);
    by_device_.push_back(slots[i]);
    device_bytes_ += static_cast<std::uint64_t>(slot.rows) * slot.outer * slot.row_bytes;
  }
  return std::nullopt;
}

std::optional<std::string> GatherPlan::start(const gather::DeviceGather& device) {
  arrays_.resize(slots_.size());
  gather::KernelRequest base;
  std::vector<mlx::core::array> slabs;
  if (!find_slabs(slabs, base)) return std::nullopt;
  // A launch has outputs of one form.
  using Form = std::tuple<mlx::core::Dtype::Val, std::size_t, std::size_t>;
  std::map<Form, std::vector<std::size_t>> forms;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.seq_axis == kNoSeqAxis || slot.outer * slot.row_bytes == 0) continue;
    forms[{slot.dtype.val(), slot.outer, slot.row_bytes}].push_back(i);
  }
  std::optional<std::string> refused;
  for (const auto& [form, slots] : forms) {
    if (auto why = start(device, request_for(base, slots), slabs, slots)) refused = std::move(why);
  }
  return refused;
}

Status GatherPlan::finish() {
  if (by_device_.empty()) return Status::ok();
  const auto why = why_no_memory([&] {
    std::vector<mlx::core::array> pending;
    for (const std::size_t slot : by_device_) pending.push_back(*arrays_[slot]);
    mlx::core::eval(std::move(pending));
  });
  by_device_.clear();
  return why ? Status{StatusCode::Full, *why} : Status::ok();
}

}  // namespace prefixcache::store
