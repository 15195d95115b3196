// gather_cases.h: geometries for the gather kernel. The CPU tests run them through the Metal source, and
// tests/gpu/write_cases.cpp writes them down for the CUDA one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <mlx/dtype.h>

#include "gather/cpu.h"
#include "gather/kernel_table.h"

namespace prefixcache::testing {

struct GatherCase {
  gather::KernelRequest request;
  std::string name;
};

// What lies in a slab; the GPU's tests compute the same.
inline std::uint8_t arena_byte(std::uint64_t slab, std::uint64_t at) {
  const auto mixed = static_cast<std::uint32_t>((at + 1) * 0x9E3779B1u + slab * 0x85EBCA6Bu);
  return static_cast<std::uint8_t>(mixed >> 15);
}

inline mlx::core::Dtype dtype_for(std::uint64_t row_bytes, std::mt19937& random) {
  const std::vector<mlx::core::Dtype> all = {mlx::core::uint8,  mlx::core::int8,     mlx::core::float16,
                                             mlx::core::uint16, mlx::core::bfloat16, mlx::core::float32,
                                             mlx::core::uint32, mlx::core::int32};
  for (;;) {
    const auto dtype = all[random() % all.size()];
    if (row_bytes % mlx::core::size_of(dtype) == 0) return dtype;
  }
}

// Images of blocks in random order, any first and last row, sometimes gaps and short blocks in between.
struct CaseMaker {
  std::mt19937 random;

  std::uint64_t below(std::uint64_t n) { return random() % n; }

  // A layout for blocks of so many rows; the bytes of their images.
  std::uint64_t add_layout(gather::KernelRequest& request, std::int64_t stored, bool aligned) {
    std::uint64_t end = aligned ? 0 : below(40);
    for (auto& tensor : request.tensors) {
      tensor.offsets.push_back(end);
      end += request.heads * static_cast<std::uint64_t>(stored) * request.row_bytes;
      end = aligned ? (end + 63) / 64 * 64 : end + below(8);
    }
    return end;
  }

  void add_rows(gather::KernelRequest& request, std::int64_t block_rows, int blocks, bool ragged) {
    std::int64_t place = 0;
    for (int b = 0; b < blocks; ++b) {
      gather::ArenaRows rows;
      rows.stored = ragged || b + 1 == blocks ? 1 + static_cast<std::int64_t>(below(block_rows)) : block_rows;
      rows.hi = ragged || b + 1 == blocks ? static_cast<std::int64_t>(below(rows.stored + 1)) : rows.stored;
      rows.lo = ragged || b == 0 ? static_cast<std::int64_t>(below(rows.hi + 1)) : 0;
      if (ragged && below(3) == 0) place += static_cast<std::int64_t>(below(5));
      rows.place = place;
      place += rows.hi - rows.lo;
      request.pieces.push_back(rows);
    }
    request.rows = place + (ragged ? static_cast<std::int64_t>(below(3)) : 0);
    request.capacity = request.rows + (below(3) == 0 ? 0 : static_cast<std::int64_t>(below(2 * block_rows + 3)));
  }

  // One layout for each length of block, and images side by side in slabs, in another order than that of the rows.
  void place_images(gather::KernelRequest& request, int slabs) {
    const bool aligned = below(4) != 0;
    std::map<std::int64_t, std::pair<std::uint64_t, std::uint64_t>> layouts;
    for (auto& rows : request.pieces) {
      auto found = layouts.find(rows.stored);
      if (found == layouts.end()) {
        const auto number = layouts.size();
        found = layouts.emplace(rows.stored, std::pair{number, add_layout(request, rows.stored, aligned)}).first;
      }
      rows.layout = found->second.first;
      rows.bytes = found->second.second;
    }
    request.slab_bytes.assign(static_cast<std::size_t>(slabs), 0);
    std::vector<std::size_t> order(request.pieces.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      auto& rows = request.pieces[i];
      rows.slab = below(request.slab_bytes.size());
      auto& end = request.slab_bytes[rows.slab];
      end += aligned ? 64 * below(3) : below(30);
      rows.at = end;
      end += rows.bytes;
    }
    for (auto& bytes : request.slab_bytes) bytes += below(30);
  }

  GatherCase make(std::uint64_t row_bytes, std::uint64_t most_bytes) {
    static constexpr int kBlockRows[] = {1, 2, 3, 5, 16, 17, 32, 64, 128, 256};
    GatherCase made;
    auto& request = made.request;
    request.row_bytes = row_bytes;
    request.heads = 1 + below(9);
    int block_rows = kBlockRows[below(std::size(kBlockRows))];
    while (block_rows > 1 && request.heads * row_bytes * static_cast<std::uint64_t>(block_rows) > most_bytes / 4) {
      block_rows /= 2;
    }
    while (request.heads > 1 && request.heads * row_bytes > most_bytes / 4) --request.heads;
    const int blocks = 1 + static_cast<int>(below(6));
    const bool ragged = below(4) == 0;
    request.clear_spare = below(4) != 0;
    const auto dtype = dtype_for(row_bytes, random);
    request.tensors.assign(1 + below(3), {{}, dtype});
    add_rows(request, block_rows, blocks, ragged);
    place_images(request, 1 + static_cast<int>(below(2)));
    made.name = std::to_string(row_bytes) + " bytes, " + std::to_string(request.heads) + " heads, blocks of " +
                std::to_string(block_rows) + ", " + std::to_string(request.rows) + " rows of " +
                std::to_string(request.capacity) + (ragged ? ", ragged" : "");
    return made;
  }
};

// One output, and how often each byte of it is to be written.
struct WantedRows {
  std::vector<std::uint8_t> bytes, writes;
};

// By the CPU's row copies. Bytes that nobody writes are `poison`.
inline WantedRows wanted_rows(const gather::KernelRequest& request, std::size_t tensor,
                              const std::vector<std::span<const std::uint8_t>>& slabs, std::uint8_t poison) {
  const std::size_t strip = static_cast<std::size_t>(request.capacity) * request.row_bytes;
  WantedRows out{std::vector<std::uint8_t>(strip * request.heads, poison),
                 std::vector<std::uint8_t>(strip * request.heads)};
  for (const auto& rows : request.pieces) {
    gather::StripCopy copy;
    copy.from = slabs[rows.slab].data() + rows.at + request.tensors[tensor].offsets[rows.layout];
    copy.to = out.bytes.data() + static_cast<std::size_t>(rows.place) * request.row_bytes;
    copy.strips = request.heads;
    copy.from_stride = static_cast<std::size_t>(rows.stored) * request.row_bytes;
    copy.to_stride = strip;
    copy.skip = static_cast<std::size_t>(rows.lo) * request.row_bytes;
    copy.size = static_cast<std::size_t>(rows.hi - rows.lo) * request.row_bytes;
    gather::copy_strips(copy);
    for (std::size_t h = 0; h < request.heads; ++h) {
      std::fill_n(out.writes.begin() + (copy.to - out.bytes.data()) + static_cast<std::ptrdiff_t>(h * strip), copy.size,
                  1);
    }
  }
  const std::size_t rows_bytes = static_cast<std::size_t>(request.rows) * request.row_bytes;
  if (!request.clear_spare) return out;
  gather::clear_strips(out.bytes.data() + rows_bytes, request.heads, strip, strip - rows_bytes);
  for (std::size_t h = 0; h < request.heads; ++h) {
    std::fill_n(out.writes.begin() + static_cast<std::ptrdiff_t>(h * strip + rows_bytes), strip - rows_bytes, 1);
  }
  return out;
}

// `rounds` cases for each length of row.
inline std::vector<GatherCase> gather_cases(int rounds, std::uint64_t most_bytes) {
  static constexpr std::uint64_t kRowBytes[] = {1,   2,   3,   4,   5,   7,    8,    12,   16,   20,   24,   31,  32,
                                                48,  63,  64,  72,  80,  96,   100,  127,  128,  144,  160,  192, 255,
                                                256, 257, 384, 512, 576, 1000, 1024, 1536, 2048, 3000, 4095, 4096};
  CaseMaker maker{std::mt19937(static_cast<unsigned>(rounds))};
  std::vector<GatherCase> cases;
  for (int round = 0; round < rounds; ++round) {
    for (const auto row_bytes : kRowBytes) cases.push_back(maker.make(row_bytes, most_bytes));
  }
  return cases;
}

}  // namespace prefixcache::testing
