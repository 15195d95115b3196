// The Metal kernel's source, compiled as C++ over checked pointers and run over many geometries.
#include <algorithm>
#include <cctype>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <metal_stdlib>

#include "gather/kernel_source.h"
#include "gather/kernel_table.h"
#include "support/gather_cases.h"

// A kernel's body, and the same as text.
#define SOURCE_AND_TEXT(name, parameters, ...) \
  inline void name parameters {                \
    __VA_ARGS__                                \
  }                                            \
  inline const char* const name##_text = #__VA_ARGS__;

#define KERNEL_ARGUMENTS                                                                                    \
  shim::In<uint64_t> table, shim::In<uint64_t> tensors, shim::In<uint8_t> arena0, shim::In<uint8_t> arena1, \
      shim::Out<uint8_t> out0, shim::Out<uint8_t> out1, shim::Out<uint8_t> out2,                            \
      metal::uint3 threadgroup_position_in_grid, metal::uint3 thread_position_in_threadgroup

// What kernel_text() writes for two slabs and three outputs; gather_blocks.metal is that of the namespace.
#define KERNEL_OF_TWO_SLABS_AND_THREE_OUTPUTS                                                     \
  SOURCE_AND_TEXT(kernel, (KERNEL_ARGUMENTS),                                                     \
                  GATHER_BEGIN(table, tensors, threadgroup_position_in_grid) GATHER_ARENA(arena0) \
                      GATHER_OR_ARENA(1, arena1) GATHER_OUTPUT(out0) GATHER_OR_OUTPUT(1, out1)    \
                          GATHER_OR_OUTPUT(2, out2) GATHER_END(thread_position_in_threadgroup))

#define GATHER_LANES 8
#define GATHER_LOADS 2
namespace small_16 {
#define GATHER_UNIT_BYTES 16
#include "../../../metal/gather_blocks.metal"
KERNEL_OF_TWO_SLABS_AND_THREE_OUTPUTS
#undef GATHER_UNIT_BYTES
}  // namespace small_16
namespace small_4 {
#define GATHER_UNIT_BYTES 4
#include "../../../metal/gather_blocks.metal"
KERNEL_OF_TWO_SLABS_AND_THREE_OUTPUTS
#undef GATHER_UNIT_BYTES
}  // namespace small_4
namespace small_1 {
#define GATHER_UNIT_BYTES 1
#include "../../../metal/gather_blocks.metal"
KERNEL_OF_TWO_SLABS_AND_THREE_OUTPUTS
#undef GATHER_UNIT_BYTES
}  // namespace small_1
#undef GATHER_LANES
#undef GATHER_LOADS
#define GATHER_LANES 64
namespace real_16 {
#define GATHER_LOADS 4
#define GATHER_UNIT_BYTES 16
#include "../../../metal/gather_blocks.metal"
KERNEL_OF_TWO_SLABS_AND_THREE_OUTPUTS
#undef GATHER_UNIT_BYTES
#undef GATHER_LOADS
}  // namespace real_16
namespace real_4 {
#define GATHER_LOADS 8
#define GATHER_UNIT_BYTES 4
#include "../../../metal/gather_blocks.metal"
KERNEL_OF_TWO_SLABS_AND_THREE_OUTPUTS
#undef GATHER_UNIT_BYTES
#undef GATHER_LOADS
}  // namespace real_4
namespace real_1 {
#define GATHER_LOADS 16
#define GATHER_UNIT_BYTES 1
#include "../../../metal/gather_blocks.metal"
KERNEL_OF_TWO_SLABS_AND_THREE_OUTPUTS
#undef GATHER_UNIT_BYTES
#undef GATHER_LOADS
}  // namespace real_1

namespace prefixcache::gather {
namespace {

namespace mx = mlx::core;
using testing::GatherCase;

constexpr std::uint8_t kPoison = 0xA5;
constexpr KernelTile kSmallTile{8, 2};
using Kernel = void (*)(KERNEL_ARGUMENTS);

Kernel kernel_for(int unit_bytes, KernelTile tile) {
  const bool small = tile.units() == kSmallTile.units();
  if (unit_bytes == 16) return small ? small_16::kernel : real_16::kernel;
  if (unit_bytes == 4) return small ? small_4::kernel : real_4::kernel;
  return small ? small_1::kernel : real_1::kernel;
}

shim::Buffer words_buffer(const std::string& name, const std::vector<std::uint64_t>& words) {
  shim::Buffer buffer(name, words.size() * sizeof(std::uint64_t));
  std::memcpy(buffer.bytes.data(), words.data(), buffer.bytes.size());
  return buffer;
}

std::vector<shim::Buffer> arena(const KernelRequest& request) {
  std::vector<shim::Buffer> slabs;
  for (std::size_t s = 0; s < 2; ++s) {
    slabs.emplace_back("slab " + std::to_string(s), s < request.slab_bytes.size() ? request.slab_bytes[s] : 0);
    for (std::size_t i = 0; i < slabs[s].bytes.size(); ++i) slabs[s].bytes[i] = testing::arena_byte(s, i);
  }
  return slabs;
}

std::vector<std::span<const std::uint8_t>> slab_bytes(const std::vector<shim::Buffer>& slabs) {
  std::vector<std::span<const std::uint8_t>> bytes;
  for (const auto& slab : slabs) bytes.emplace_back(slab.bytes);
  return bytes;
}

// Every thread of the grid, one after the other.
std::vector<shim::Buffer> run(const KernelRequest& request, const KernelTable& table,
                              std::vector<shim::Buffer>& slabs) {
  const auto tensors_at = table.words.begin() + static_cast<std::ptrdiff_t>(table.tensors_at);
  auto words = words_buffer("table", {table.words.begin(), tensors_at});
  auto tensors = words_buffer("tensors", {tensors_at, table.words.end()});
  const auto out_bytes = static_cast<std::size_t>(request.capacity) * request.row_bytes * request.heads;
  std::vector<shim::Buffer> outs;
  for (std::size_t t = 0; t < 3; ++t) {
    outs.emplace_back("output " + std::to_string(t), t < request.tensors.size() ? out_bytes : 0, kPoison);
  }
  const Kernel kernel = kernel_for(table.unit_bytes, table.tile);
  metal::uint3 group, thread;
  for (group.z = 0; group.z < request.tensors.size(); ++group.z) {
    for (group.y = 0; group.y < request.heads; ++group.y) {
      for (group.x = 0; group.x < table.groups; ++group.x) {
        for (thread.x = 0; thread.x < static_cast<std::uint32_t>(table.tile.lanes); ++thread.x) {
          kernel(shim::In<uint64_t>(words), shim::In<uint64_t>(tensors), shim::In<uint8_t>(slabs[0]),
                 shim::In<uint8_t>(slabs[1]), shim::Out<uint8_t>(outs[0]), shim::Out<uint8_t>(outs[1]),
                 shim::Out<uint8_t>(outs[2]), group, thread);
        }
      }
    }
  }
  return outs;
}

// Counts what was run, by unit.
void check(const GatherCase& made, std::optional<KernelTile> tile, int (&units)[17]) {
  const auto table = make_kernel_table(made.request, tile);
  auto slabs = arena(made.request);
  shim::faults().clear();
  const auto outs = run(made.request, table, slabs);
  ASSERT_THAT(shim::faults(), ::testing::IsEmpty()) << made.name;
  for (std::size_t t = 0; t < made.request.tensors.size(); ++t) {
    const auto want = testing::wanted_rows(made.request, t, slab_bytes(slabs), kPoison);
    ASSERT_TRUE(outs[t].bytes == want.bytes) << "tensor " << t << " of " << made.name;
    ASSERT_TRUE(outs[t].writes == want.writes) << "bytes written twice or for nothing: " << made.name;
  }
  ++units[table.unit_bytes];
}

TEST(GatherKernel, MetalSourceGivesTheRowsThatTheCpuGives) {
  int units[17] = {};
  for (const auto& made : testing::gather_cases(10, 12'000)) check(made, kSmallTile, units);
  EXPECT_GT(units[16], 50);
  EXPECT_GT(units[4], 50);
  EXPECT_GT(units[1], 50);
}

TEST(GatherKernel, WithTheTilesThatGpusRun) {
  int units[17] = {};
  for (const auto& made : testing::gather_cases(2, 60'000)) check(made, std::nullopt, units);
  for (int unit : {16, 4, 1}) EXPECT_GT(units[unit], 5) << unit;
}

// Of 2 images of 4 rows, 2 heads of 16 bytes.
KernelRequest small_request() {
  KernelRequest request;
  request.slab_bytes = {512};
  request.heads = 2;
  request.row_bytes = 16;
  request.rows = 6;
  request.capacity = 8;
  request.pieces = {{0, 256, 256, 0, 4, 1, 4, 0}, {0, 0, 256, 0, 4, 0, 3, 3}};
  request.tensors = {{{0}, mx::float16}, {{128}, mx::float16}};
  return request;
}

TEST(GatherKernel, TheShimSeesEveryIndexOutside) {
  const auto request = small_request();
  const auto good = make_kernel_table(request, kSmallTile);
  ASSERT_EQ(good.unit_bytes, 16);
  const auto faults_of = [&](const KernelTable& table) {
    shim::faults().clear();
    auto slabs = arena(request);
    run(request, table, slabs);
    return shim::faults();
  };
  EXPECT_THAT(faults_of(good), ::testing::IsEmpty());
  auto behind_slab = good;
  behind_slab.words[kHeaderWords] += 15;
  EXPECT_THAT(faults_of(behind_slab), ::testing::Contains(::testing::HasSubstr("load of 16 bytes at 512 of slab 0")));
  auto behind_output = good;
  behind_output.words[kHeaderWords + 3] += 14;
  EXPECT_THAT(faults_of(behind_output),
              ::testing::Contains(::testing::HasSubstr("store of 16 bytes at 256 of output")));
  auto short_table = good;
  short_table.words.erase(short_table.words.begin() + static_cast<std::ptrdiff_t>(--short_table.tensors_at));
  EXPECT_THAT(faults_of(short_table), ::testing::Contains(::testing::HasSubstr("of table, which has")));
}

TEST(GatherKernel, TheHostWritesTheSourceThatWasTested) {
  const auto squeezed = [](std::string text) {
    std::erase_if(text, [](unsigned char c) { return std::isspace(c) != 0; });
    return text;
  };
  const auto metal = kernel_text(KernelLanguage::metal, 16, 2, 3, mx::float16, tile_for(16));
  EXPECT_EQ(squeezed(metal.source), squeezed(real_16::kernel_text));
  const auto cuda = kernel_text(KernelLanguage::cuda, 16, 2, 3, mx::float16, tile_for(16));
  EXPECT_THAT(cuda.source, ::testing::StartsWith("GATHER_BEGIN(table, tensors, blockIdx)\nGATHER_ARENA(arena0)\n"));
  EXPECT_THAT(cuda.source, ::testing::EndsWith("GATHER_OR_OUTPUT(2, out2)\nGATHER_END(threadIdx)\n"));
  for (const auto& text : {metal, cuda}) {
    EXPECT_THAT(text.inputs, ::testing::ElementsAre("table", "tensors", "arena0", "arena1"));
    EXPECT_THAT(text.outputs, ::testing::ElementsAre("out0", "out1", "out2"));
    EXPECT_THAT(text.header, ::testing::StartsWith(
                                 "#define GATHER_UNIT_BYTES 16\n#define GATHER_LANES 64\n#define GATHER_LOADS 4\n"));
    EXPECT_THAT(text.header, ::testing::HasSubstr("#define GATHER_END(thread)"));
    EXPECT_THAT(text.header, ::testing::Not(::testing::HasSubstr("#include \"")));
  }
}

TEST(GatherKernel, NamesTellTextsApart) {
  constexpr KernelTile kTile;
  std::vector<std::string> names;
  for (int unit : {1, 4, 16}) {
    for (int slabs : {1, 2}) {
      for (auto dtype : {mx::float16, mx::bfloat16}) {
        for (int outputs : {1, 16}) {
          names.push_back(kernel_text(KernelLanguage::metal, unit, slabs, outputs, dtype, kTile).name);
        }
      }
    }
  }
  names.push_back(kernel_text(KernelLanguage::metal, 16, 1, 1, mx::float16, kSmallTile).name);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
  EXPECT_THROW(kernel_text(KernelLanguage::metal, 8, 1, 1, mx::float16, kTile), std::invalid_argument);
  EXPECT_THROW(kernel_text(KernelLanguage::metal, 16, 0, 1, mx::float16, kTile), std::invalid_argument);
  EXPECT_THROW(kernel_text(KernelLanguage::metal, 16, 1, 29, mx::float16, kTile), std::invalid_argument);
  EXPECT_NO_THROW(kernel_text(KernelLanguage::metal, 16, 1, 28, mx::float16, kTile));
  EXPECT_NO_THROW(kernel_text(KernelLanguage::cuda, 16, 1, 64, mx::float16, kTile));
}

TEST(GatherKernel, OutputsAreSharedByFewLaunchesOfFewSizes) {
  EXPECT_THAT(split_outputs(64), ::testing::ElementsAre(16, 16, 16, 16));
  EXPECT_THAT(split_outputs(56), ::testing::ElementsAre(14, 14, 14, 14));
  EXPECT_THAT(split_outputs(60), ::testing::ElementsAre(15, 15, 15, 15));
  EXPECT_THAT(split_outputs(70), ::testing::ElementsAre(14, 14, 14, 14, 14));
  EXPECT_THAT(split_outputs(34), ::testing::ElementsAre(12, 11, 11));
  EXPECT_THAT(split_outputs(3), ::testing::ElementsAre(3));
  EXPECT_THAT(split_outputs(0), ::testing::IsEmpty());
  for (int count = 1; count < 200; ++count) {
    const auto sizes = split_outputs(count);
    EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), 0), count);
    EXPECT_LE(sizes.front(), 16);
    EXPECT_LE(sizes.front() - sizes.back(), 1);
  }
}

}  // namespace
}  // namespace prefixcache::gather
