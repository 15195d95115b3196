// checksum_avx2.cpp: XXH3 with AVX2. On x86-64 the build compiles this file alone with -mavx2.
#ifdef __AVX2__

#include "hash/xxh3_backend_impl.h"

namespace prefixcache::hash {

const Xxh3Backend* xxh3_avx2_backend() {
  return &kBackend;
}

}  // namespace prefixcache::hash

#else

#include "hash/xxh3_backend.h"

namespace prefixcache::hash {

const Xxh3Backend* xxh3_avx2_backend() {
  return nullptr;
}

}  // namespace prefixcache::hash

#endif
