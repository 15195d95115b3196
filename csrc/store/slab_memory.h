// slab_memory.h: slab_memory() with another source of arrays than MLX's allocator, such as a device that is full.
//
// Threads: as memory.h.
// Owns:    what it made.
// Errors:  std::bad_alloc or std::runtime_error from `make` mean that there is no memory.
#pragma once

#include <functional>
#include <memory>

#include <mlx/array.h>

#include "store/memory.h"

namespace prefixcache::store {

// A fresh evaluated array of this shape.
using MakeArray = std::function<mlx::core::array(mlx::core::Shape, mlx::core::Dtype)>;
std::unique_ptr<Memory> slab_memory(MakeArray make);

}  // namespace prefixcache::store
