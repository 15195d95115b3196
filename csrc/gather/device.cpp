#include "gather/device.h"

#include <cstdlib>
#include <stdexcept>

#include <mlx/device.h>
#include <mlx/ops.h>
#include <mlx/transforms.h>

namespace prefixcache::gather {

namespace mx = mlx::core;

namespace {

mx::array upload(const std::vector<std::uint64_t>& words) {
  return mx::array(words.data(), {static_cast<mx::ShapeElem>(words.size())}, mx::uint64);
}

// Whatever the caller's default device is. Tests launch on the CPU.
mx::StreamOrDevice gpu() {
  return mx::is_available(mx::Device::gpu) ? mx::StreamOrDevice(mx::Device(mx::Device::gpu)) : mx::StreamOrDevice();
}

// A launch has kSlabsALaunch slabs.
void bind_slabs(std::span<const mx::array> slabs, std::vector<mx::array>& inputs) {
  if (slabs.empty() || slabs.size() > kSlabsALaunch) {
    throw std::invalid_argument("[gather_kernel] " + std::to_string(slabs.size()) + " slabs, expected 1 to " +
                                std::to_string(kSlabsALaunch));
  }
  for (std::size_t s = 0; s < kSlabsALaunch; ++s) inputs.push_back(s < slabs.size() ? slabs[s] : slabs[0]);
}

}  // namespace

std::vector<mx::array> KernelGather::launch(const KernelTable& table, std::vector<mx::array> inputs,
                                            std::span<const mx::Shape> shapes, mx::Dtype dtype, int heads) const {
  const auto outputs = static_cast<int>(shapes.size());
  const int lanes = table.tile.lanes;
  // MLX's own tables of kernels are not for several threads at once.
  std::lock_guard lock(mutex_);
  auto& kernel = kernels_[{table.unit_bytes, outputs, dtype.val()}];
  if (!kernel) {
    kernel = compile_(kernel_text(language_, table.unit_bytes, kSlabsALaunch, outputs, dtype, table.tile));
  }
  auto made =
      kernel(inputs, {shapes.begin(), shapes.end()}, std::vector<mx::Dtype>(shapes.size(), dtype),
             {static_cast<int>(table.groups) * lanes, heads, outputs}, {lanes, 1, 1}, {}, std::nullopt, false, gpu());
  // The device begins while the next launch is described.
  mx::async_eval(made);
  return made;
}

std::vector<mx::array> KernelGather::start(const KernelRequest& request, std::span<const mx::array> slabs,
                                           std::span<const mx::Shape> shapes) const {
  const KernelTable table = make_kernel_table(request);
  if (table.groups == 0) throw std::invalid_argument("[gather_kernel] nothing to gather");
  if (slabs.size() != request.slab_bytes.size() || shapes.size() != request.tensors.size()) {
    throw std::invalid_argument("[gather_kernel] " + std::to_string(slabs.size()) + " slabs and " +
                                std::to_string(shapes.size()) + " shapes for a request of others");
  }
  const mx::Dtype dtype = request.tensors.front().dtype;
  const mx::array words = upload(table.words);
  const auto end = static_cast<mx::ShapeElem>(table.words.size());

  std::vector<mx::array> made;
  try {
    for (const int outputs : split_outputs(static_cast<int>(shapes.size()))) {
      const auto first = static_cast<mx::ShapeElem>(table.tensors_at + made.size());
      std::vector<mx::array> inputs = {words, mx::slice(words, {first}, {end}, gpu())};
      bind_slabs(slabs, inputs);
      const auto some = launch(table, std::move(inputs), shapes.subspan(made.size(), static_cast<std::size_t>(outputs)),
                               dtype, static_cast<int>(request.heads));
      made.insert(made.end(), some.begin(), some.end());
    }
  } catch (...) {
    // Launches before the one that failed read the slabs until they have ended.
    try {
      mx::eval(std::move(made));
    } catch (const std::runtime_error&) {
      // The first failure is the one that is told.
    }
    throw;
  }
  return made;
}

const DeviceGather* device_gather() {
  const char* const asked = std::getenv("PREFIXCACHE_GATHER");
  const std::string name = asked != nullptr ? asked : "";
  if (name == "cpu") return nullptr;
  if (!name.empty() && name != "metal" && name != "cuda") {
    throw std::invalid_argument("PREFIXCACHE_GATHER is '" + name + "', expected cpu, metal or cuda");
  }
  if (name.empty() && mx::default_device().type != mx::Device::gpu) return nullptr;
  const DeviceGather* found = name == "cuda" ? nullptr : metal_gather();
  if (found == nullptr && name != "metal") found = cuda_gather();
  if (found == nullptr && !name.empty()) {
    throw std::invalid_argument("PREFIXCACHE_GATHER is '" + name + "', which MLX does not find here");
  }
  return found;
}

}  // namespace prefixcache::gather
