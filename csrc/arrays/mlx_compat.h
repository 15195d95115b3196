// mlx_compat.h: the one place that knows how releases of MLX, and its devices, differ.
#pragma once

#include <cstdint>
#include <mutex>
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

// Where the bytes of an evaluated array lie; null where it has none. Any thread, with arrays that others ask about too:
// MLX's CUDA build moves a buffer to memory that the CPU can read when it is first asked for it, and frees it too early
// where two threads ask at once.
inline const std::uint8_t* bytes_of(const mlx::core::array& array) {
  static std::mutex asking;
  // There may be no buffer that could be asked.
  if (array.nbytes() == 0) return nullptr;
  std::lock_guard lock(asking);
  return array.data<std::uint8_t>();
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
