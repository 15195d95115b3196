// digest.h: a digest of a whole array, for fingerprints of models.
//
// Threads: any; meanwhile nobody may change the array, nor other code read its bytes. An array that is not evaluated is
//          evaluated on the calling thread.
// Owns:    nothing; at most one 8 MiB buffer a thread while it runs, none for a row-contiguous array.
// Errors:  what evaluating the array throws.
#pragma once

#include <mlx/array.h>

#include "prefixcache/api.h"
#include "prefixcache/block_hash.h"

namespace prefixcache {

// Digest of dtype, shape and every byte in row-major order, whatever the strides. Finds any accidental difference; it
// does not withstand an attacker who can choose the bytes. `threads` (0: one a core, at most 8) does not change it.
PREFIXCACHE_API Key array_digest(const mlx::core::array& array, int threads = 0);

}  // namespace prefixcache
