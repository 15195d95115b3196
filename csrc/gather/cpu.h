// cpu.h: the CPU's gather: rows of one block into their places in a result.
//
// Threads: plain functions; several may run on disjoint destinations. They own nothing, so that they may be abandoned
//          where a mapped file shrinks (fault_guard.h).
// Units:   bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hash/checksum.h"

namespace prefixcache::gather {

// A tensor of a block has `strips` strips, one for each index before the sequence axis; of each the same run is taken.
struct StripCopy {
  const std::uint8_t* from = nullptr;
  std::uint8_t* to = nullptr;  // where the first strip's run goes
  std::size_t strips = 0;
  std::size_t from_stride = 0;  // the length of a strip
  std::size_t to_stride = 0;
  std::size_t skip = 0;  // of each strip, before the run
  std::size_t size = 0;  // of the run
};

void copy_strips(const StripCopy& copy);

// The same; `sum` then covers all strips. Of the run it is that of the copy, not of the source: what is handed out is
// what was checked, whatever happens to the source meanwhile.
void copy_strips_and_sum(const StripCopy& copy, hash::Xxh3Stream& sum);

// Zeros in `size` bytes of each strip, the first of which begins at `to`.
void clear_strips(std::uint8_t* to, std::size_t strips, std::size_t stride, std::size_t size);

}  // namespace prefixcache::gather
