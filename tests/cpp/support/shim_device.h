// shim_device.h: a device for tests: the Metal kernel's source run as C++ over checked pointers, launched as MLX would.
//
// Threads: one launch at a time.
#pragma once

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <mlx/ops.h>
#include <mlx/transforms.h>
#include <metal_stdlib>

#include "gather/device.h"

#define SHIM_KERNEL_ARGUMENTS                                                                  \
  shim::In<uint64_t> table, shim::In<uint64_t> tensors, std::vector<shim::In<uint8_t>>&arenas, \
      std::vector<shim::Out<uint8_t>>&outs, metal::uint3 threadgroup_position_in_grid,         \
      metal::uint3 thread_position_in_threadgroup

// The lines that kernel_text() writes, as loops.
#define SHIM_KERNEL                                                               \
  inline void kernel(SHIM_KERNEL_ARGUMENTS) {                                     \
    GATHER_BEGIN(table, tensors, threadgroup_position_in_grid)                    \
    GATHER_ARENA(arenas[0])                                                       \
    for (std::size_t i = 1; i < arenas.size(); ++i) GATHER_OR_ARENA(i, arenas[i]) \
    GATHER_OUTPUT(outs[0])                                                        \
    for (std::size_t i = 1; i < outs.size(); ++i) GATHER_OR_OUTPUT(i, outs[i])    \
    GATHER_END(thread_position_in_threadgroup)                                    \
  }

#define GATHER_LANES 64
namespace shim_16 {
#define GATHER_LOADS 4
#define GATHER_UNIT_BYTES 16
#include "../../../metal/gather_blocks.metal"
SHIM_KERNEL
#undef GATHER_UNIT_BYTES
#undef GATHER_LOADS
}  // namespace shim_16
namespace shim_4 {
#define GATHER_LOADS 8
#define GATHER_UNIT_BYTES 4
#include "../../../metal/gather_blocks.metal"
SHIM_KERNEL
#undef GATHER_UNIT_BYTES
#undef GATHER_LOADS
}  // namespace shim_4
namespace shim_1 {
#define GATHER_LOADS 16
#define GATHER_UNIT_BYTES 1
#include "../../../metal/gather_blocks.metal"
SHIM_KERNEL
#undef GATHER_UNIT_BYTES
#undef GATHER_LOADS
}  // namespace shim_1
#undef GATHER_LANES

namespace prefixcache::testing {

namespace mx = mlx::core;

inline shim::Buffer shim_buffer(const std::string& name, const mx::array& array) {
  if (array.nbytes() == 0) return {name, 0};
  return {name, array.data<std::uint8_t>(), array.nbytes()};
}

// One launch. Outputs are poisoned; no byte may be written twice, and nothing outside of a buffer read or written.
class ShimLaunch {
 public:
  explicit ShimLaunch(const gather::KernelText& text) : text_(text) {}

  std::vector<mx::array> operator()(std::vector<mx::array> inputs, const std::vector<mx::Shape>& shapes,
                                    const std::vector<mx::Dtype>& dtypes, std::tuple<int, int, int> grid,
                                    std::tuple<int, int, int> group) const {
    static std::mutex one_at_a_time;
    const std::lock_guard lock(one_at_a_time);
    for (auto& input : inputs) input = mx::contiguous(input);
    mx::eval(inputs);
    auto table = shim_buffer("table", inputs[0]);
    auto tensors = shim_buffer("tensors", inputs[1]);
    std::vector<shim::Buffer> slabs, results;
    for (std::size_t i = 2; i < inputs.size(); ++i) {
      // Those bound again have no bytes of their own: nothing may be read from them.
      const bool again = i > 2 && inputs[i].data<std::uint8_t>() == inputs[2].data<std::uint8_t>();
      slabs.push_back(again ? shim::Buffer("no slab", 0) : shim_buffer("slab " + std::to_string(i - 2), inputs[i]));
    }
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      std::size_t bytes = mx::size_of(dtypes[i]);
      for (const auto extent : shapes[i]) bytes *= static_cast<std::size_t>(extent);
      results.emplace_back("output " + std::to_string(i), bytes, 0xA5);
    }
    EXPECT_EQ(std::get<2>(grid), static_cast<int>(shapes.size()));
    run(table, tensors, slabs, results, grid, group);
    std::vector<mx::array> made;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      EXPECT_LE(*std::max_element(results[i].writes.begin(), results[i].writes.end()), 1);
      const mx::Shape flat = {static_cast<mx::ShapeElem>(results[i].bytes.size())};
      const mx::array bytes(results[i].bytes.data(), flat, mx::uint8);
      made.push_back(mx::reshape(mx::view(bytes, dtypes[i]), shapes[i]));
    }
    mx::eval(made);
    return made;
  }

 private:
  void run(shim::Buffer& table, shim::Buffer& tensors, std::vector<shim::Buffer>& slabs,
           std::vector<shim::Buffer>& results, std::tuple<int, int, int> grid, std::tuple<int, int, int> group) const {
    const bool wide = text_.header.starts_with("#define GATHER_UNIT_BYTES 16");
    const auto kernel = wide                                                      ? shim_16::kernel
                        : text_.header.starts_with("#define GATHER_UNIT_BYTES 4") ? shim_4::kernel
                                                                                  : shim_1::kernel;
    std::vector<shim::In<std::uint8_t>> arenas;
    std::vector<shim::Out<std::uint8_t>> outs;
    for (auto& slab : slabs) arenas.emplace_back(slab);
    for (auto& result : results) outs.emplace_back(result);
    shim::faults().clear();
    metal::uint3 at, thread;
    const auto lanes = static_cast<std::uint32_t>(std::get<0>(group));
    for (at.z = 0; at.z < static_cast<std::uint32_t>(std::get<2>(grid)); ++at.z) {
      for (at.y = 0; at.y < static_cast<std::uint32_t>(std::get<1>(grid)); ++at.y) {
        for (at.x = 0; at.x < static_cast<std::uint32_t>(std::get<0>(grid)) / lanes; ++at.x) {
          for (thread.x = 0; thread.x < lanes; ++thread.x) {
            kernel(shim::In<std::uint64_t>(table), shim::In<std::uint64_t>(tensors), arenas, outs, at, thread);
          }
        }
      }
    }
    for (const auto& fault : shim::faults()) ADD_FAILURE() << fault;
  }

  gather::KernelText text_;
};

inline const gather::DeviceGather& shim_device() {
  static const gather::KernelGather device("shim", gather::KernelLanguage::metal, [](const gather::KernelText& text) {
    return [launch = ShimLaunch(text)](const auto& inputs, const auto& shapes, const auto& dtypes, auto grid,
                                       auto group, const auto&, auto, bool,
                                       auto) { return launch(inputs, shapes, dtypes, grid, group); };
  });
  return device;
}

}  // namespace prefixcache::testing
