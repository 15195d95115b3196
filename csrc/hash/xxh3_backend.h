// xxh3_backend.h: XXH3 compiled for one instruction set, behind plain functions.
//
// Threads: any; a state belongs to one thread at a time.
#pragma once

// Nothing of the standard library may come in here: its inline functions, compiled for AVX2, could be the ones that the
// linker keeps for machines without it.
#include <stddef.h>
#include <stdint.h>

namespace prefixcache::hash {

struct Xxh3Backend {
  uint64_t (*hash64)(const void* data, size_t size);
  // 16 bytes in the order that xxHash calls canonical.
  void (*hash128)(const void* data, size_t size, unsigned char* out);
  // `state` is an XXH3_state_t, reset.
  void (*update)(void* state, const void* data, size_t size);
  uint64_t (*digest)(const void* state);
};

// Null where it was not compiled in. Call what it holds only on a processor with AVX2.
const Xxh3Backend* xxh3_avx2_backend();

}  // namespace prefixcache::hash
