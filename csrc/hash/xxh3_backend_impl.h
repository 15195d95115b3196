// xxh3_backend_impl.h: the body of a backend, for the two files that compile it with different flags.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "hash/xxh3_backend.h"

namespace prefixcache::hash {

// Internal linkage: each file keeps its own copy, compiled with its own flags.
static uint64_t backend_hash64(const void* data, size_t size) {
  return XXH3_64bits(data, size);
}

static void backend_hash128(const void* data, size_t size, unsigned char* out) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, size));
  for (size_t i = 0; i < sizeof canonical.digest; ++i) out[i] = canonical.digest[i];
}

static void backend_update(void* state, const void* data, size_t size) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, size);
}

static uint64_t backend_digest(const void* state) {
  return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state));
}

static const Xxh3Backend kBackend{backend_hash64, backend_hash128, backend_update, backend_digest};

}  // namespace prefixcache::hash
