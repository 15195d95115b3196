#include "store/buffer_pool.h"

#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace prefixcache::store {
namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;

struct Kind {
  const char* name;
  std::unique_ptr<Memory> (*memory)();
};

// What a pool promises, wherever its memory comes from.
class BufferPoolTest : public ::testing::TestWithParam<Kind> {
 protected:
  static std::shared_ptr<BufferPool> pool_of(std::uint64_t limit) {
    return std::make_shared<BufferPool>(limit, GetParam().memory());
  }
};

TEST(BufferPool, RoundsToWholePages) {
  EXPECT_EQ(BufferPool::rounded(0), 64 * kKiB);
  EXPECT_EQ(BufferPool::rounded(1), 64 * kKiB);
  EXPECT_EQ(BufferPool::rounded(64 * kKiB), 64 * kKiB);
  EXPECT_EQ(BufferPool::rounded(64 * kKiB + 1), 128 * kKiB);
  EXPECT_EQ(BufferPool::rounded(kMiB - 1), kMiB);
  EXPECT_EQ(BufferPool::rounded(kMiB), 2 * kMiB);
  EXPECT_EQ(BufferPool::rounded(2 * kMiB + 1), 4 * kMiB);
}

TEST(BufferPool, SaysWhereABufferLies) {
  EXPECT_EQ(std::make_shared<BufferPool>(kMiB)->acquire(1)->slab(), nullptr);
  const auto pool = std::make_shared<BufferPool>(kMiB, slab_memory());
  const auto first = pool->acquire(1);
  const auto second = pool->acquire(1);
  ASSERT_NE(second->slab(), nullptr);
  EXPECT_EQ(second->slab(), first->slab());
  EXPECT_EQ(first->offset(), 0u);
  EXPECT_EQ(second->offset(), 64 * kKiB);
  EXPECT_EQ(second->data(), second->slab()->memory.data<std::uint8_t>() + second->offset());
}

TEST_P(BufferPoolTest, CountsWhatItHandsOutAndKeepsIt) {
  const auto pool = pool_of(10 * kMiB);
  auto a = pool->acquire(100 * kKiB);
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->size(), 128 * kKiB);
  EXPECT_EQ(pool->in_use(), 128 * kKiB);
  const std::uint64_t held = pool->held();
  EXPECT_GE(held, 128 * kKiB);
  const std::uint8_t* where = a->data();
  a.reset();
  EXPECT_EQ(pool->in_use(), 0u);
  EXPECT_EQ(pool->held(), held);
  // Recycled, also for a little less.
  const auto b = pool->acquire(120 * kKiB);
  EXPECT_EQ(b->data(), where);
  EXPECT_EQ(pool->in_use(), 128 * kKiB);
  EXPECT_EQ(pool->held(), held);
  EXPECT_EQ(pool->peak(), held);
}

TEST_P(BufferPoolTest, GivesNothingBeyondTheBound) {
  const auto pool = pool_of(256 * kKiB);
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
  b.reset();
  EXPECT_NE(pool->acquire(256 * kKiB), nullptr);
  EXPECT_EQ(pool_of(0)->acquire(0), nullptr);
}

TEST_P(BufferPoolTest, ABufferKeepsItsPool) {
  std::shared_ptr<Buffer> buffer = pool_of(kMiB)->acquire(10);
  std::memset(buffer->data(), 1, buffer->size());
}

TEST_P(BufferPoolTest, TheBoundHoldsForSeveralThreads) {
  const auto pool = pool_of(4 * kMiB);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<std::shared_ptr<Buffer>> mine;
      const auto is_mine = [t](const Buffer& buffer) {
        return buffer.data()[0] == t && buffer.data()[buffer.size() - 1] == t;
      };
      for (int i = 0; i < 400; ++i) {
        if (auto buffer = pool->acquire(random() % (900 * kKiB))) {
          buffer->data()[0] = buffer->data()[buffer->size() - 1] = static_cast<std::uint8_t>(t);
          mine.push_back(std::move(buffer));
        }
        if (!mine.empty() && random() % 2 == 0) {
          const auto goes = mine.begin() + static_cast<long>(random() % mine.size());
          if (!is_mine(**goes)) ADD_FAILURE() << "somebody else has this memory";
          mine.erase(goes);
        }
        if (i % 50 == 0) pool->trim(random() % pool->limit());
        if (pool->held() > pool->limit()) ADD_FAILURE() << pool->held();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_LE(pool->peak(), pool->limit());
  EXPECT_EQ(pool->in_use(), 0u);
  pool->close();
  EXPECT_EQ(pool->held(), 0u);
}

TEST_P(BufferPoolTest, OnlyWhatIsSpareIsGivenBack) {
  const auto pool = pool_of(10 * kMiB);
  auto kept = pool->acquire(64 * kKiB);
  pool->acquire(2 * kMiB);
  std::memset(kept->data(), 7, kept->size());
  pool->trim(0);
  EXPECT_LT(pool->held(), 2 * kMiB);
  EXPECT_EQ(pool->in_use(), 64 * kKiB);
  pool->close();
  EXPECT_EQ(pool->in_use(), 64 * kKiB);
  EXPECT_EQ(std::vector<std::uint8_t>(kept->data(), kept->data() + kept->size()),
            std::vector<std::uint8_t>(kept->size(), 7));
  kept.reset();
  EXPECT_EQ(pool->held(), 0u);
}

TEST_P(BufferPoolTest, WhoeverWaitsHearsOfMemoryThatComesBack) {
  const auto pool = pool_of(64 * kKiB);
  auto buffer = pool->acquire(1);
  const auto in_a_minute = [] { return std::chrono::steady_clock::now() + std::chrono::minutes(1); };
  std::uint64_t seen = pool->changes();
  EXPECT_FALSE(pool->wait_for_change(seen, std::chrono::steady_clock::now()));
  std::thread releases([&] { buffer.reset(); });
  EXPECT_TRUE(pool->wait_for_change(seen, in_a_minute()));
  releases.join();
  EXPECT_NE(pool->acquire(1), nullptr);
  seen = pool->changes();
  pool->notify();
  EXPECT_TRUE(pool->wait_for_change(seen, in_a_minute()));
}

INSTANTIATE_TEST_SUITE_P(Kinds, BufferPoolTest,
                         ::testing::Values(Kind{"mapped", mapped_memory}, Kind{"slabs", slab_memory}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace prefixcache::store
