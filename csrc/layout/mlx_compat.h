// mlx_compat.h: the one place that knows how releases of MLX differ.
#pragma once

#include <cstdint>
#include <new>
#include <utility>

#include <mlx/allocator.h>
#include <mlx/array.h>
#include <mlx/version.h>

namespace prefixcache {

// A fresh, evaluated array of uninitialised memory and the only owner of it. Throws std::runtime_error or
// std::bad_alloc where the device has no memory left or the shape is more than can be addressed.
inline mlx::core::array make_uninitialised(mlx::core::Shape shape, mlx::core::Dtype dtype) {
  std::size_t bytes = mlx::core::size_of(dtype);
  for (auto extent : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes)) throw std::bad_alloc();
  }
#if MLX_VERSION_NUMERIC >= 32002
  mlx::core::array made(mlx::core::allocator::malloc(bytes), std::move(shape), dtype);
#else
  mlx::core::array made(mlx::core::allocator::malloc(bytes), std::move(shape), dtype, mlx::core::allocator::free);
#endif
  // The CPU's allocator says so only in this way.
  if (bytes > 0 && made.data<std::uint8_t>() == nullptr) throw std::bad_alloc();
  return made;
}

}  // namespace prefixcache
