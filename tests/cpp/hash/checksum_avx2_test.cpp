#include "hash/xxh3_backend.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace prefixcache::hash {
namespace {

TEST(ChecksumAvx2, GivesTheSameValues) {
  const Xxh3Backend* avx2 = xxh3_avx2_backend();
#ifdef __x86_64__
  ASSERT_NE(avx2, nullptr) << "checksum_avx2.cpp was compiled without -mavx2";
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "this processor has no AVX2";
#else
  if (avx2 == nullptr) GTEST_SKIP() << "no AVX2 on this architecture";
#endif
  std::vector<std::uint8_t> bytes(70000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * i >> 3);
  for (std::size_t size : {0u, 5u, 200u, 300u, 1024u, 69999u}) {
    const std::uint8_t* data = bytes.data() + 1;
    EXPECT_EQ(avx2->hash64(data, size), XXH3_64bits(data, size)) << size;
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    avx2->update(&state, data, size / 3);
    avx2->update(&state, data + size / 3, size - size / 3);
    EXPECT_EQ(avx2->digest(&state), XXH3_64bits(data, size)) << size;
    XXH128_canonical_t expected;
    unsigned char got[16];
    XXH128_canonicalFromHash(&expected, XXH3_128bits(data, size));
    avx2->hash128(data, size, got);
    for (int i = 0; i < 16; ++i) EXPECT_EQ(got[i], expected.digest[i]) << size;
  }
}

}  // namespace
}  // namespace prefixcache::hash
