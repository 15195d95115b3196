// kernel_table.h: what the gather kernel is told, checked so that no kernel can read outside the arena.
//
// Threads: plain values and functions.
// Errors:  std::invalid_argument for anything that would read outside a slab or an image, or write outside an output.
// Units:   rows are tokens; bytes for sizes, except in KernelTable, which counts in units of `unit_bytes`. Slabs and
//          outputs are to begin at multiples of 16, as MLX's own buffers do.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <mlx/dtype.h>

#include "gather/kernel_source.h"

namespace prefixcache::gather {

// Rows of one block. Its image lies in a slab: tensors [heads, stored, row_bytes], each without gaps, where its layout
// says.
struct ArenaRows {
  std::uint64_t slab = 0;
  std::uint64_t at = 0;      // bytes, where the image begins in its slab
  std::uint64_t bytes = 0;   // of the image
  std::uint64_t layout = 0;  // blocks of other lengths have their tensors at other places
  std::int64_t stored = 0;   // rows that the image holds
  std::int64_t lo = 0;       // those taken, counted from its first
  std::int64_t hi = 0;
  std::int64_t place = 0;  // row of the output where they go
};

// One output, [heads, capacity, row_bytes], and where its tensor begins in an image of each layout.
struct ArenaTensor {
  std::vector<std::uint64_t> offsets;
  mlx::core::Dtype dtype = mlx::core::uint8;
};

struct KernelRequest {
  std::vector<std::uint64_t> slab_bytes;
  std::uint64_t heads = 1;
  std::uint64_t row_bytes = 0;  // of one head
  std::int64_t rows = 0;
  std::int64_t capacity = 0;
  bool clear_spare = true;  // rows [rows, capacity) become zero; otherwise they are left as they are
  // In ascending order of place, without overlap. Rows that none covers are left as they are.
  std::vector<ArenaRows> pieces;
  std::vector<ArenaTensor> tensors;  // of one dtype
};

struct KernelTable {
  int unit_bytes = 1;
  KernelTile tile;
  // One upload: a header, 4 words a piece (slab and unit where it begins, stride of its heads, layout and length, unit
  // of the output), and from `tensors_at` on where each tensor begins in an image of the first layout, then in one of
  // the second, and so on. A launch from tensor t on sees the words behind tensors_at + t; there are at least 8 of
  // them, since Metal hands shorter arrays over in another way.
  std::vector<std::uint64_t> words;
  std::size_t tensors_at = 0;
  // Groups of tile.lanes threads: this many for each head of each output. 0: there is nothing to launch.
  std::uint64_t groups = 0;
};

inline constexpr std::size_t kHeaderWords = 4;
inline constexpr std::size_t kPieceWords = 4;
inline constexpr std::size_t kLeastTensorWords = 8;
inline constexpr std::uint64_t kClearedSlab = 255;
inline constexpr int kSlabShift = 56;
inline constexpr int kLayoutShift = 32;

// The widest unit that divides every offset and every length is chosen, and the tile for it unless one is given.
KernelTable make_kernel_table(const KernelRequest& request, std::optional<KernelTile> tile = std::nullopt);

}  // namespace prefixcache::gather
