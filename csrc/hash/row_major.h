// row_major.h: elements of a strided array, copied in row-major order.
//
// Threads: any.
// Units:   elements for shape, strides and positions; bytes for item sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace prefixcache::hash {

struct StridedView {
  const std::uint8_t* data = nullptr;
  std::size_t item_size = 1;  // 1, 2, 4, 8 or 16
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

// Copies elements [first, first + count) of the row-major order to `out`. REQUIRES: they exist.
void copy_row_major(const StridedView& view, std::size_t first, std::size_t count, std::uint8_t* out);

}  // namespace prefixcache::hash
