// kernel_source.h: the gather kernel's text, as mlx::core::fast::metal_kernel and cuda_kernel take it.
//
// Threads: plain functions.
#pragma once

#include <string>
#include <vector>

#include <mlx/dtype.h>

namespace prefixcache::gather {

// How a group shares a tile: `lanes` threads, each with `loads` units on their way at once.
struct KernelTile {
  int lanes = 64;
  int loads = 4;
  int units() const { return lanes * loads; }
};

// The fastest one for units of 16, 4 or 1 bytes (docs/gpu.md): about 4 KB, so that short blocks fill it too.
KernelTile tile_for(int unit_bytes);

struct KernelText {
  std::string name;  // another text has another name, for MLX keeps compiled kernels by it, on disk too
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  std::string header;
  std::string source;
};

enum class KernelLanguage { metal, cuda };

// Slabs of every launch, the first one bound again where there are fewer: another number is another kernel.
inline constexpr int kSlabsALaunch = 8;

// Slabs and outputs of one launch together. Metal gives a kernel 31 buffers, of which the table and the tensors'
// offsets take two.
inline constexpr int most_buffers(KernelLanguage language) {
  return language == KernelLanguage::metal ? 29 : 128;
}

// Inputs: "table" and "tensors" (uint64), then "arena0" ... (uint8), one for each of `slabs`; outputs "out0" ...
// `unit_bytes` is KernelTable's. std::invalid_argument for another unit, and for more than most_buffers().
KernelText kernel_text(KernelLanguage language, int unit_bytes, int slabs, int outputs, mlx::core::Dtype dtype,
                       KernelTile tile);

// How many outputs each launch of `count` has: as few launches as `most` allows, in as few sizes as possible, for every
// size is another kernel, and MLX takes seconds to compile one. Several outputs pay: a launch costs microseconds.
std::vector<int> split_outputs(int count, int most = 16);

}  // namespace prefixcache::gather
