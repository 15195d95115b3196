// mlx_compat.h: the one place that knows how releases of MLX differ.
#pragma once

#include <utility>

#include <mlx/allocator.h>
#include <mlx/array.h>
#include <mlx/version.h>

namespace prefixcache {

// A fresh, evaluated array of uninitialised memory and the only owner of it. Throws std::runtime_error or
// std::bad_alloc where the device has no memory left.
inline mlx::core::array make_uninitialised(mlx::core::Shape shape, mlx::core::Dtype dtype) {
  std::size_t bytes = mlx::core::size_of(dtype);
  for (auto extent : shape) bytes *= static_cast<std::size_t>(extent);
#if MLX_VERSION_NUMERIC >= 32002
  return mlx::core::array(mlx::core::allocator::malloc(bytes), std::move(shape), dtype);
#else
  return mlx::core::array(mlx::core::allocator::malloc(bytes), std::move(shape), dtype, mlx::core::allocator::free);
#endif
}

}  // namespace prefixcache
