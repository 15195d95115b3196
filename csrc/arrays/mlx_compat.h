// mlx_compat.h: the one place that knows how releases of MLX differ.
#pragma once

#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
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

// Runs `work`, which allocates through MLX. Nothing if it went well; otherwise what was said where the device has no
// memory for it: MLX's allocators throw either of these.
template <class Work>
std::optional<std::string> why_no_memory(Work&& work) {
  try {
    work();
  } catch (const std::bad_alloc& e) {
    return e.what();
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return std::nullopt;
}

}  // namespace prefixcache
