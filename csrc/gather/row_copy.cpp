#include <cstring>

#include "arrays/shared_array.h"
#include "gather/copy.h"
#include "prefixcache/slot.h"

namespace prefixcache::gather {

RowCopy::RowCopy(const mlx::core::array& source, int axis, std::int64_t lo, std::int64_t hi)
    : shape_(source.shape()),
      strides_(source.strides()),
      base_(bytes_of(source)),
      item_(mlx::core::size_of(source.dtype())),
      axis_(axis == kNoSeqAxis ? 0 : axis) {
  for (auto& stride : strides_) stride *= static_cast<std::int64_t>(item_);
  if (axis != kNoSeqAxis) {
    base_ += lo * strides_[axis];
    shape_[axis] = static_cast<mlx::core::ShapeElem>(hi - lo);
  }
  const int rank = static_cast<int>(shape_.size());
  for (int d = 0; d < axis_; ++d) outer_ *= static_cast<std::size_t>(shape_[d]);
  strip_bytes_ = item_;
  for (int d = axis_; d < rank; ++d) strip_bytes_ *= static_cast<std::size_t>(shape_[d]);

  run_bytes_ = item_;
  contiguous_from_ = rank;
  while (contiguous_from_ > axis_ && (shape_[contiguous_from_ - 1] == 1 ||
                                      strides_[contiguous_from_ - 1] == static_cast<std::int64_t>(run_bytes_))) {
    --contiguous_from_;
    run_bytes_ *= static_cast<std::size_t>(shape_[contiguous_from_]);
  }
}

void RowCopy::copy_strip(std::uint8_t* to, const std::uint8_t* from) const {
  if (contiguous_from_ <= axis_) {
    copy_streaming(to, from, strip_bytes_);
    return;
  }
  // An odometer over the dimensions that are not one run.
  mlx::core::Shape at(shape_.size(), 0);
  for (std::size_t done = 0; done < strip_bytes_; done += run_bytes_, to += run_bytes_) {
    std::memcpy(to, from, run_bytes_);
    for (int d = contiguous_from_ - 1; d >= axis_; --d) {
      from += strides_[d];
      if (++at[d] < shape_[d]) break;
      from -= strides_[d] * shape_[d];
      at[d] = 0;
    }
  }
}

void RowCopy::run(std::uint8_t* to, std::size_t outer_lo, std::size_t outer_hi) const {
  if (strip_bytes_ == 0) return;
  for (std::size_t o = outer_lo; o < outer_hi; ++o) {
    const std::uint8_t* from = base_;
    std::size_t rest = o;
    for (int d = axis_ - 1; d >= 0; --d) {
      from += static_cast<std::int64_t>(rest % static_cast<std::size_t>(shape_[d])) * strides_[d];
      rest /= static_cast<std::size_t>(shape_[d]);
    }
    copy_strip(to + o * strip_bytes_, from);
  }
}

}  // namespace prefixcache::gather
