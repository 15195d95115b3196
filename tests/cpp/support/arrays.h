// arrays.h: random arrays of any dtype and any strides, and their bytes.
//
// Threads: they evaluate lazy arrays: one thread only.
#pragma once

#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <mlx/ops.h>
#include <mlx/transforms.h>

#include "arrays/mlx_compat.h"

namespace prefixcache::testing {

inline const std::vector<mlx::core::Dtype>& all_dtypes() {
  static const std::vector<mlx::core::Dtype> dtypes = {mlx::core::float32, mlx::core::float16, mlx::core::bfloat16,
                                                       mlx::core::uint8,   mlx::core::uint16,  mlx::core::uint32,
                                                       mlx::core::uint64,  mlx::core::int8,    mlx::core::int16,
                                                       mlx::core::int32,   mlx::core::int64,   mlx::core::bool_};
  return dtypes;
}

inline mlx::core::Shape random_shape(std::mt19937& random, std::size_t rank, unsigned longest = 5) {
  mlx::core::Shape shape;
  for (std::size_t d = 0; d < rank; ++d) shape.push_back(1 + static_cast<int>(random() % longest));
  return shape;
}

// Any bit pattern, NaNs included; bools are 0 or 1.
inline mlx::core::array random_array(std::mt19937& random, const mlx::core::Shape& shape, mlx::core::Dtype dtype) {
  auto array = make_uninitialised(shape, dtype);
  auto* data = array.data<std::uint8_t>();
  for (std::size_t i = 0; i < array.nbytes(); ++i) {
    data[i] = static_cast<std::uint8_t>(dtype == mlx::core::bool_ ? random() & 1 : random());
  }
  return array;
}

// Of this shape, seen through a transposition, a strided slice or a broadcast, or plain.
inline mlx::core::array strided_array(std::mt19937& random, const mlx::core::Shape& shape, mlx::core::Dtype dtype) {
  const auto rank = shape.size();
  std::vector<int> axes(rank);
  std::iota(axes.begin(), axes.end(), 0);
  if (random() % 2 == 0) std::shuffle(axes.begin(), axes.end(), random);
  mlx::core::Shape start(rank, 0), stop = shape, step(rank, 1), full = shape;
  for (std::size_t d = 0; d < rank; ++d) {
    if (random() % 3 != 0) continue;
    start[d] = static_cast<int>(random() % 3);
    step[d] = 1 + static_cast<int>(random() % 3);
    stop[d] = start[d] + (shape[d] - 1) * step[d] + 1;
    full[d] = stop[d] + static_cast<int>(random() % 3);
  }
  const bool broadcast = random() % 4 == 0;
  const std::size_t repeated = random() % rank;
  if (broadcast) {
    full[repeated] = stop[repeated] = step[repeated] = 1;
    start[repeated] = 0;
  }
  mlx::core::Shape stored(rank);
  std::vector<int> back(rank);
  for (std::size_t d = 0; d < rank; ++d) {
    stored[d] = full[static_cast<std::size_t>(axes[d])];
    back[static_cast<std::size_t>(axes[d])] = static_cast<int>(d);
  }
  auto array = mlx::core::transpose(random_array(random, stored, dtype), back);
  array = mlx::core::slice(array, start, stop, step);
  if (broadcast) array = mlx::core::broadcast_to(array, shape);
  mlx::core::eval(array);
  return array;
}

inline mlx::core::array rows_of(const mlx::core::array& array, int axis, std::int64_t lo, std::int64_t hi) {
  mlx::core::Shape start(array.ndim(), 0), stop = array.shape();
  start[static_cast<std::size_t>(axis)] = static_cast<int>(lo);
  stop[static_cast<std::size_t>(axis)] = static_cast<int>(hi);
  return mlx::core::slice(array, start, stop);
}

// In row-major order.
inline std::vector<std::uint8_t> bytes_of(const mlx::core::array& array) {
  if (array.size() == 0) return {};
  auto plain = mlx::core::contiguous(array);
  mlx::core::eval(plain);
  const auto* data = plain.data<std::uint8_t>();
  return {data, data + plain.nbytes()};
}

}  // namespace prefixcache::testing
