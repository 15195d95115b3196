// slot.h: named arrays of a cache, and the parts of a block that hold their rows.
//
// Threads: plain values; SlotInput keeps a reference to its array.
// Units:   rows are tokens along the slot's sequence axis; positions count from the start of the sequence.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <mlx/array.h>

#include "prefixcache/api.h"

namespace prefixcache {

// The slots of one reach in one block. The numbers and names reach the disk: do not change.
enum class Part : std::uint8_t {
  kv = 0,     // rows needed from every block up to n
  win = 1,    // rows needed from the blocks that cover the last w rows
  state = 2,  // whole arrays, exact only where they were captured
};
inline constexpr int kPartCount = 3;

PREFIXCACHE_API std::string_view part_name(Part part);
// False, and `out` untouched, if no part has this name.
PREFIXCACHE_API bool part_from_name(std::string_view name, Part& out);

// A slot without a sequence axis is stored and restored whole.
inline constexpr int kNoSeqAxis = -1;

// One array to store from. Rows [row_lo, row_hi) of the sequence are rows [row_lo - first_row, row_hi - first_row) of
// `array` along `seq_axis`. Any strides. The array must be evaluated.
struct SlotInput {
  std::string name;
  mlx::core::array array;
  int seq_axis = kNoSeqAxis;
  std::int64_t first_row = 0;
};

}  // namespace prefixcache
