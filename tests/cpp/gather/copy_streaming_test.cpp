#include <algorithm>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "gather/copy.h"

namespace prefixcache::gather {
namespace {

TEST(CopyStreaming, AnySizeAndAlignmentAndNothingBeyond) {
  std::mt19937 random(1);
  std::vector<std::uint8_t> from(100000);
  for (auto& byte : from) byte = static_cast<std::uint8_t>(random() | 1);  // never 0
  std::vector<std::uint8_t> to(from.size());
  std::vector<std::size_t> sizes = {0, 1, 15, 63, 64, 4095, 4096, 4097, 4111, 4160, 8191, 65536, 99000};
  for (int i = 0; i < 20; ++i) sizes.push_back(random() % 99000);
  for (const std::size_t size : sizes) {
    for (int round = 0; round < 4; ++round) {
      const std::size_t a = random() % 130, b = random() % 130;
      std::fill(to.begin(), to.end(), 0);
      copy_streaming(to.data() + a, from.data() + b, size);
      ASSERT_TRUE(std::equal(from.begin() + static_cast<long>(b), from.begin() + static_cast<long>(b + size),
                             to.begin() + static_cast<long>(a)))
          << size << " bytes to +" << a << " from +" << b;
      ASSERT_TRUE(std::all_of(to.begin(), to.begin() + static_cast<long>(a), [](auto x) { return x == 0; }));
      ASSERT_TRUE(std::all_of(to.begin() + static_cast<long>(a + size), to.end(), [](auto x) { return x == 0; }));
    }
  }
}

// The last page that may be read or written, with a guard page behind it under a sanitizer or without.
TEST(CopyStreaming, ReadsNothingBehindTheSource) {
  for (const std::size_t size : {4096u, 5000u, 70000u}) {
    std::vector<std::uint8_t> from(size, 7);
    from.shrink_to_fit();
    std::vector<std::uint8_t> to(size);
    copy_streaming(to.data(), from.data(), size);
    EXPECT_EQ(to, from);
  }
}

}  // namespace
}  // namespace prefixcache::gather
