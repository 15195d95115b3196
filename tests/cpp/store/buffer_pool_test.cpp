#include "store/buffer_pool.h"

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "gather/huge_pages.h"

namespace prefixcache::store {
namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;

TEST(BufferPool, RoundsToWholePages) {
  EXPECT_EQ(BufferPool::rounded(0), 64 * kKiB);
  EXPECT_EQ(BufferPool::rounded(1), 64 * kKiB);
  EXPECT_EQ(BufferPool::rounded(64 * kKiB), 64 * kKiB);
  EXPECT_EQ(BufferPool::rounded(64 * kKiB + 1), 128 * kKiB);
  EXPECT_EQ(BufferPool::rounded(kMiB - 1), kMiB);
  EXPECT_EQ(BufferPool::rounded(kMiB), 2 * kMiB);
  EXPECT_EQ(BufferPool::rounded(2 * kMiB + 1), 4 * kMiB);
}

TEST(BufferPool, CountsWhatItHandsOutAndKeepsIt) {
  const auto pool = std::make_shared<BufferPool>(10 * kMiB);
  auto a = pool->acquire(100 * kKiB);
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->size(), 128 * kKiB);
  EXPECT_EQ(pool->held(), 128 * kKiB);
  const std::uint8_t* where = a->data();
  a.reset();
  EXPECT_EQ(pool->held(), 128 * kKiB);
  // Recycled, also for a little less.
  const auto b = pool->acquire(120 * kKiB);
  EXPECT_EQ(b->data(), where);
  EXPECT_EQ(pool->held(), 128 * kKiB);
  EXPECT_EQ(pool->peak(), 128 * kKiB);
}

TEST(BufferPool, ASpareMuchTooLargeIsNotUsed) {
  const auto pool = std::make_shared<BufferPool>(10 * kMiB);
  pool->acquire(512 * kKiB);
  const auto small = pool->acquire(64 * kKiB);
  EXPECT_EQ(small->size(), 64 * kKiB);
  EXPECT_EQ(pool->held(), 576 * kKiB);
}

TEST(BufferPool, GivesNothingBeyondTheBound) {
  const auto pool = std::make_shared<BufferPool>(256 * kKiB);
  EXPECT_EQ(pool->acquire(256 * kKiB + 1), nullptr);
  auto a = pool->acquire(128 * kKiB);
  auto b = pool->acquire(128 * kKiB);
  ASSERT_TRUE(a && b);
  EXPECT_EQ(pool->acquire(1), nullptr);
  a.reset();
  // The spare makes room for another size.
  EXPECT_NE(pool->acquire(64 * kKiB), nullptr);
  EXPECT_LE(pool->held(), 256 * kKiB);
  EXPECT_EQ(pool->peak(), 256 * kKiB);
  EXPECT_EQ(std::make_shared<BufferPool>(0)->acquire(0), nullptr);
}

TEST(BufferPool, LargeMemoryBeginsOnAHugePageAndSmallMemoryIsWritable) {
  const auto pool = std::make_shared<BufferPool>(64 * kMiB);
  const auto large = pool->acquire(3 * kMiB);
  ASSERT_NE(large, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large->data()) % gather::kHugePage, 0u);
  std::memset(large->data(), 1, large->size());
  const auto small = pool->acquire(5);
  std::memset(small->data(), 1, small->size());
}

TEST(BufferPool, ABufferKeepsItsPool) {
  std::shared_ptr<Buffer> buffer = std::make_shared<BufferPool>(kMiB)->acquire(10);
  std::memset(buffer->data(), 1, 10);
}

TEST(BufferPool, TheBoundHoldsForSeveralThreads) {
  const auto pool = std::make_shared<BufferPool>(4 * kMiB);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<std::shared_ptr<Buffer>> mine;
      for (int i = 0; i < 400; ++i) {
        if (auto buffer = pool->acquire(random() % (900 * kKiB))) {
          buffer->data()[0] = 1;
          buffer->data()[buffer->size() - 1] = 1;
          mine.push_back(std::move(buffer));
        }
        if (!mine.empty() && random() % 2 == 0) mine.erase(mine.begin() + static_cast<long>(random() % mine.size()));
        if (pool->held() > pool->limit()) ADD_FAILURE() << pool->held();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_LE(pool->peak(), pool->limit());
}

TEST(BufferPool, TrimGivesBackOnlyWhatIsSpare) {
  const auto pool = std::make_shared<BufferPool>(10 * kMiB);
  auto kept = pool->acquire(64 * kKiB);
  pool->acquire(128 * kKiB);
  pool->acquire(256 * kKiB);
  EXPECT_EQ(pool->held(), 448 * kKiB);
  pool->trim(400 * kKiB);
  EXPECT_EQ(pool->held(), 192 * kKiB);
  pool->trim(0);
  EXPECT_EQ(pool->held(), 64 * kKiB);
  std::memset(kept->data(), 1, kept->size());
  pool->close();
  EXPECT_EQ(pool->held(), 64 * kKiB);
  kept.reset();
  EXPECT_EQ(pool->held(), 0u);
}

}  // namespace
}  // namespace prefixcache::store
