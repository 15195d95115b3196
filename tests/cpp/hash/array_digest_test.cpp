#include <cstdint>
#include <unordered_set>
#include <vector>

#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include "prefixcache/digest.h"

namespace prefixcache {
namespace {

namespace mx = mlx::core;

TEST(ArrayDigest, DtypeShapeAndBytesMatter) {
  const std::vector<mx::array> arrays{
      mx::zeros({4}, mx::int32),
      mx::zeros({4}, mx::uint32),
      mx::zeros({4}, mx::float32),
      mx::zeros({2, 2}, mx::int32),
      mx::zeros({4, 1}, mx::int32),
      mx::zeros({5}, mx::int32),
      mx::zeros({0}, mx::int32),
      mx::zeros({0, 3}, mx::int32),
      mx::zeros({0}, mx::float16),
      mx::zeros({8}, mx::bfloat16),
      mx::zeros({8}, mx::float16),
      mx::zeros({16}, mx::bool_),
      mx::array({0, 0, 0, 1}),
      mx::array({0, 0, 1, 0}),
      mx::array(0),
      mx::array(1),
  };
  std::unordered_set<Key> digests;
  for (const mx::array& array : arrays) digests.insert(array_digest(array));
  EXPECT_EQ(digests.size(), arrays.size());
}

TEST(ArrayDigest, StridesDoNotMatter) {
  const mx::array base = mx::reshape(mx::arange(0, 3 * 50 * 70, mx::int16), {3, 50, 70});
  for (const mx::array& view : {
           mx::transpose(base, {2, 0, 1}),
           mx::slice(base, {1, 3, 5}, {3, 40, 69}, {1, 2, 3}),
           mx::broadcast_to(mx::array({1, 2, 3}), {4, 3}),
           mx::slice(base, {2, 0, 0}, {3, 50, 70}),
       }) {
    EXPECT_EQ(array_digest(view), array_digest(mx::contiguous(view)));
  }
}

// Over several chunks, so that threads share the work.
TEST(ArrayDigest, ThreadsDoNotMatterAndEveryChunkDoes) {
  constexpr int kSize = (20 << 20) + 12345;
  std::vector<std::uint8_t> bytes(kSize);
  for (int i = 0; i < kSize; ++i) bytes[i] = static_cast<std::uint8_t>(i % 251);
  const auto digest = [&](int threads) { return array_digest(mx::array(bytes.begin(), {kSize}, mx::uint8), threads); };
  const Key key = digest(1);
  EXPECT_EQ(digest(2), key);
  EXPECT_EQ(digest(7), key);
  EXPECT_EQ(digest(0), key);
  for (const int at : {0, (8 << 20) - 1, 8 << 20, 16 << 20, kSize - 1}) {
    bytes[at] ^= 1;
    EXPECT_NE(digest(2), key) << at;
    bytes[at] ^= 1;
  }
}

TEST(ArrayDigest, StridedArraysOfSeveralChunks) {
  const mx::array base = mx::reshape(mx::arange(0, 3000 * 2000, mx::int32), {3000, 2000});
  const mx::array view = mx::slice(base, {0, 0}, {3000, 2000}, {1, 2});
  const Key key = array_digest(mx::contiguous(view));
  EXPECT_EQ(array_digest(view, 1), key);
  EXPECT_EQ(array_digest(view, 3), key);
}

}  // namespace
}  // namespace prefixcache
