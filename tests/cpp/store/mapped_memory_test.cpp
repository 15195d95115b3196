#include <cstring>

#include <gtest/gtest.h>

#include "gather/huge_pages.h"
#include "store/buffer_pool.h"
#include "support/heap_limit.h"

namespace prefixcache::store {
namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;

TEST(MappedMemory, ASpareMuchTooLargeIsNotUsed) {
  const auto pool = std::make_shared<BufferPool>(10 * kMiB);
  pool->acquire(512 * kKiB);
  const auto small = pool->acquire(64 * kKiB);
  EXPECT_EQ(small->size(), 64 * kKiB);
  EXPECT_EQ(pool->held(), 576 * kKiB);
  const auto other = pool->acquire(448 * kKiB);
  EXPECT_EQ(other->size(), 512 * kKiB) << "a little too large";
  EXPECT_EQ(pool->held(), 576 * kKiB);
}

TEST(MappedMemory, LargeMemoryBeginsOnAHugePageAndSmallMemoryIsWritable) {
  const auto pool = std::make_shared<BufferPool>(64 * kMiB);
  const auto large = pool->acquire(3 * kMiB);
  ASSERT_NE(large, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large->data()) % gather::kHugePage, 0u);
  std::memset(large->data(), 1, large->size());
  const auto small = pool->acquire(5);
  std::memset(small->data(), 1, small->size());
}

TEST(MappedMemory, WhatTheHeapCannotRememberIsGivenUp) {
  const auto pool = std::make_shared<BufferPool>(10 * kMiB);
  auto range = pool->acquire(64 * kKiB);
  testing::most = 0;
  range.reset();
  testing::most = std::numeric_limits<std::size_t>::max();
  EXPECT_EQ(pool->held(), 0u);
  EXPECT_EQ(pool->acquire(64 * kKiB)->size(), 64 * kKiB);
}

TEST(MappedMemory, TheLargestSpareGoesFirst) {
  const auto pool = std::make_shared<BufferPool>(10 * kMiB);
  auto kept = pool->acquire(64 * kKiB);
  pool->acquire(128 * kKiB);
  pool->acquire(256 * kKiB);
  EXPECT_EQ(pool->held(), 448 * kKiB);
  pool->trim(400 * kKiB);
  EXPECT_EQ(pool->held(), 192 * kKiB);
  pool->trim(0);
  EXPECT_EQ(pool->held(), 64 * kKiB);
}

}  // namespace
}  // namespace prefixcache::store
