#include "hash/checksum.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace prefixcache::hash {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes random_bytes(std::size_t size) {
  std::mt19937 random(static_cast<std::mt19937::result_type>(size));
  Bytes bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

// Lengths on both sides of every change of algorithm in XXH3, and unaligned starts.
const std::size_t kSizes[] = {0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 5000, 100003};

TEST(Checksum, IsTheLibrarysXxh3) {
  for (const std::size_t size : kSizes) {
    const Bytes bytes = random_bytes(size + 1);
    const std::span<const std::uint8_t> data = std::span(bytes).subspan(1);
    EXPECT_EQ(xxh3_64(data), XXH3_64bits(data.data(), data.size())) << size;
    XXH128_canonical_t expected;
    XXH128_canonicalFromHash(&expected, XXH3_128bits(data.data(), data.size()));
    EXPECT_TRUE(std::ranges::equal(xxh3_128(data), expected.digest)) << size;
  }
}

TEST(Checksum, KnownValues) {
  EXPECT_EQ(xxh3_64({}), 0x2d06800538d394c2u);
  EXPECT_EQ(xxh3_128({})[0], 0x99u);  // 99aa06d3014798d86001c324468d497f
}

TEST(Checksum, PiecesGiveTheChecksumOfTheWhole) {
  std::mt19937 random(3);
  for (const std::size_t size : kSizes) {
    const Bytes bytes = random_bytes(size);
    Xxh3Stream stream;
    for (std::size_t at = 0; at < size;) {
      const std::size_t piece = std::min<std::size_t>(size - at, random() % 700);
      stream.update(std::span(bytes).subspan(at, piece));
      at += piece;
    }
    EXPECT_EQ(stream.digest(), xxh3_64(bytes)) << size;
    EXPECT_EQ(stream.digest(), xxh3_64(bytes)) << "a digest changes nothing";
  }
}

TEST(Checksum, EveryBitMatters) {
  Bytes bytes = random_bytes(400);
  const std::uint64_t before = xxh3_64(bytes);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    EXPECT_NE(xxh3_64(bytes), before) << bit;
    bytes[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
  }
}

}  // namespace
}  // namespace prefixcache::hash
