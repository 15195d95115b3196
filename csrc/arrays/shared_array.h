// shared_array.h: arrays that other threads may be asking about, too.
//
// Threads: any. MLX's arrays are not made for it: to ask whether one is evaluated writes to it, and where the CPU first
//          asks for a buffer of the CUDA build, that buffer moves and the old one is freed. Here one asks at a time.
#pragma once

#include <cstdint>

#include <mlx/array.h>

#include "prefixcache/api.h"

namespace prefixcache {

// The bindings are a library of their own, so this is exported: there must be one lock.
PREFIXCACHE_API bool is_evaluated(const mlx::core::array& array);

// Where the bytes of an evaluated array lie; null where it has none. Waits for the device where the buffer has to move.
PREFIXCACHE_API const std::uint8_t* bytes_of(const mlx::core::array& array);

}  // namespace prefixcache
