// copy.h: the copies of the two lines: plain bytes, and rows of arrays of any strides.
//
// Threads: plain functions; several may run on disjoint destinations.
// Units:   bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <mlx/array.h>

namespace prefixcache::gather {

// Copies `size` bytes past the caches where that is faster: for results that nobody reads back at once. The regions
// do not overlap.
void copy_streaming(std::uint8_t* to, const std::uint8_t* from, std::size_t size);

// The same, with a second copy in `keep`, which stays in the cache. Each source byte is read once: `keep` holds what
// `to` holds, whatever happens to the source meanwhile.
void copy_streaming_and_keep(std::uint8_t* to, std::uint8_t* keep, const std::uint8_t* from, std::size_t size);

// Rows [lo, hi) along `axis` of an evaluated array (the whole array if axis is kNoSeqAxis), written in row-major
// order. `outer_lo`, `outer_hi` restrict the work to a range of the outer index (the product of the extents before
// `axis`), so that threads can share one array. `to` is where outer index 0 goes.
struct RowCopy {
  explicit RowCopy(const mlx::core::array& source, int axis, std::int64_t lo, std::int64_t hi);

  std::size_t outer() const { return outer_; }
  // Bytes of all rows of one outer index.
  std::size_t strip_bytes() const { return strip_bytes_; }
  void run(std::uint8_t* to, std::size_t outer_lo, std::size_t outer_hi) const;

 private:
  void copy_strip(std::uint8_t* to, const std::uint8_t* from) const;

  mlx::core::Shape shape_;      // of the rows taken
  mlx::core::Strides strides_;  // in bytes
  const std::uint8_t* base_;
  std::size_t item_;
  std::size_t outer_ = 1;
  std::size_t strip_bytes_ = 0;
  int axis_;
  int contiguous_from_;  // dimensions from here on are one run of bytes
  std::size_t run_bytes_;
};

}  // namespace prefixcache::gather
