// row_major.cpp: one run of the last axis at a time.
#include "hash/row_major.h"

#include <algorithm>
#include <cstring>

namespace prefixcache::hash {

namespace {

template <std::size_t N>
void copy_items(const std::uint8_t* from, std::int64_t step, std::size_t count, std::uint8_t* to) {
  for (std::size_t i = 0; i < count; ++i, from += step, to += N) std::memcpy(to, from, N);
}

void copy_run(const StridedView& view, const std::uint8_t* from, std::int64_t stride, std::size_t count,
              std::uint8_t* to) {
  const std::int64_t step = stride * static_cast<std::int64_t>(view.item_size);
  if (stride == 1) {
    std::memcpy(to, from, count * view.item_size);
    return;
  }
  switch (view.item_size) {
    case 1:
      return copy_items<1>(from, step, count, to);
    case 2:
      return copy_items<2>(from, step, count, to);
    case 4:
      return copy_items<4>(from, step, count, to);
    case 8:
      return copy_items<8>(from, step, count, to);
    default:
      return copy_items<16>(from, step, count, to);
  }
}

}  // namespace

void copy_row_major(const StridedView& view, std::size_t first, std::size_t count, std::uint8_t* out) {
  if (count == 0) return;
  if (view.shape.empty()) {
    std::memcpy(out, view.data, view.item_size);
    return;
  }
  const std::size_t last = view.shape.size() - 1;
  const auto extent = [&](std::size_t axis) { return static_cast<std::size_t>(view.shape[axis]); };
  std::vector<std::size_t> at(view.shape.size());
  for (std::size_t axis = last + 1, rest = first; axis-- > 0; rest /= extent(axis)) at[axis] = rest % extent(axis);

  while (count > 0) {
    std::int64_t offset = 0;
    for (std::size_t axis = 0; axis <= last; ++axis) offset += static_cast<std::int64_t>(at[axis]) * view.strides[axis];
    const std::size_t run = std::min(count, extent(last) - at[last]);
    copy_run(view, view.data + offset * static_cast<std::int64_t>(view.item_size), view.strides[last], run, out);
    out += run * view.item_size;
    count -= run;
    at[last] = 0;
    for (std::size_t axis = last; axis-- > 0;) {
      if (++at[axis] < extent(axis)) break;
      at[axis] = 0;
    }
  }
}

}  // namespace prefixcache::hash
