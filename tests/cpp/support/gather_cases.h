// gather_cases.h: geometries for the gather kernel. The CPU tests run them through the Metal source, and
// tests/gpu/write_cases.cpp writes them down for the CUDA one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <mlx/dtype.h>

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

// Slots of `block_rows` rows in random order, any first and last row, sometimes gaps and short blocks in between.
struct CaseMaker {
  std::mt19937 random;

  std::uint64_t below(std::uint64_t n) { return random() % n; }

  void add_slots(gather::KernelRequest& request, std::uint64_t block_rows, int tensors, int slabs, int slots) {
    const auto dtype = dtype_for(request.row_bytes, random);
    const bool aligned = below(4) != 0;
    std::uint64_t end = aligned ? 0 : below(40);
    for (int t = 0; t < tensors; ++t) {
      request.tensors.push_back({end, dtype});
      end += request.heads * block_rows * request.row_bytes;
      end = aligned ? (end + 63) / 64 * 64 : end + below(8);
    }
    request.slot_bytes = end;
    for (int s = 0; s < slabs; ++s) request.slab_bytes.push_back(end * static_cast<std::uint64_t>(slots) + below(30));
  }

  void add_rows(gather::KernelRequest& request, std::int64_t block_rows, int blocks, int slots, bool ragged) {
    std::vector<int> order(static_cast<std::size_t>(slots));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::int64_t place = 0;
    for (int b = 0; b < blocks; ++b) {
      gather::ArenaRows rows;
      rows.slab = static_cast<std::int64_t>(below(request.slab_bytes.size()));
      rows.slot = order[static_cast<std::size_t>(b)];
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
    const int slots = blocks + static_cast<int>(below(3));
    const bool ragged = below(4) == 0;
    request.clear_spare = below(4) != 0;
    add_slots(request, static_cast<std::uint64_t>(block_rows), 1 + static_cast<int>(below(3)),
              1 + static_cast<int>(below(2)), slots);
    add_rows(request, block_rows, blocks, slots, ragged);
    made.name = std::to_string(row_bytes) + " bytes, " + std::to_string(request.heads) + " heads, blocks of " +
                std::to_string(block_rows) + ", " + std::to_string(request.rows) + " rows of " +
                std::to_string(request.capacity) + (ragged ? ", ragged" : "");
    return made;
  }
};

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
