// A RAM tier in a few arrays of MLX's: what is there stays exact, and memory goes back by whole slabs.
#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <mlx/memory.h>

#include "support/store_fixture.h"

namespace prefixcache {
namespace {

using testing::Block;
using testing::chain;
using testing::expect_chain;
using testing::kPage;
using testing::one_page;
using testing::put_block;
using testing::put_chain;

// Slabs of 8 pages.
class StoreArena : public testing::StoreFixture {
 protected:
  StoreArena() {
    arena_ = true;
    options_.ram_bytes = 64 * kPage;
  }

  static std::vector<testing::SlotSpec> pages(int count) {
    return {{"keys", mlx::core::uint8, {0, count * static_cast<int>(kPage) / 4}, 0}};
  }
};

TEST_F(StoreArena, TheSlabWhoseNewestPartIsTheOldestGoesFirst) {
  options_.write = WritePolicy::ram_only;
  const auto store = open();
  const auto a = chain(4, 4, 1), b = chain(12, 4, 2);
  put_chain(*store, a, one_page());
  put_chain(*store, b, one_page());
  EXPECT_EQ(store->stats().ram_bytes, 16 * kPage);
  EXPECT_EQ(store->trim_ram(16 * kPage), 0u);
  EXPECT_EQ(store->trim_ram(15 * kPage), 8 * kPage);
  EXPECT_EQ(store->stats().ram_bytes, 8 * kPage);
  EXPECT_EQ(store->stats().evicted_ram_parts, 8u);
  expect_chain(*store, a, one_page());
  EXPECT_EQ(found(*store, b), 4u);
  expect_chain(*store, {b.begin(), b.begin() + 4}, one_page());
  EXPECT_EQ(store->trim_ram(0), 8 * kPage);
  EXPECT_EQ(store->stats().parts, 0u);
}

TEST_F(StoreArena, BlocksGoWithThoseBeforeThem) {
  options_.write = WritePolicy::ram_only;
  const auto store = open();
  const auto a = chain(12, 4, 1), b = chain(4, 4, 2);
  put_chain(*store, a, one_page());
  put_chain(*store, b, one_page());
  // The slab with the beginning of a is the older one.
  EXPECT_EQ(store->trim_ram(8 * kPage), 8 * kPage);
  EXPECT_EQ(in_ram(*store, a), 0u);
  EXPECT_EQ(store->stats().parts, 4u);
  expect_chain(*store, b, one_page());
  // Their places are free again.
  put_chain(*store, {a.begin(), a.begin() + 4}, one_page());
  EXPECT_EQ(store->stats().ram_bytes, 8 * kPage);
}

TEST_F(StoreArena, WhatIsOnTheDiskIsServedFromThere) {
  const auto store = open();
  const auto blocks = chain(20, 4);
  put_chain(*store, blocks, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(store->stats().ram_bytes, 24 * kPage);
  EXPECT_EQ(store->trim_ram(10 * kPage), 16 * kPage);
  EXPECT_EQ(in_ram(*store, blocks), 8u);
  EXPECT_EQ(store->stats().parts, 20u);
  expect_chain(*store, blocks, one_page());
}

TEST_F(StoreArena, ASlabInWhichSomethingStaysKeepsAllOfIt) {
  options_.write = WritePolicy::ram_only;
  const auto store = open();
  const auto a = chain(8, 4, 1), b = chain(8, 4, 2);
  put_chain(*store, a, one_page());
  put_chain(*store, b, one_page());
  const std::vector<Key> kept = {a[0].key};
  EXPECT_EQ(store->trim_ram(0, kept), 8 * kPage);
  EXPECT_EQ(store->stats().ram_bytes, 8 * kPage);
  expect_chain(*store, a, one_page());
  EXPECT_EQ(in_ram(*store, b), 0u);
}

TEST_F(StoreArena, WhatWaitsToBeWrittenStays) {
  env_.hold_writes();
  const auto store = open();
  const auto blocks = chain(10, 4);
  put_chain(*store, blocks, one_page());
  env_.wait_for_write();
  EXPECT_EQ(store->trim_ram(0), 0u);
  EXPECT_EQ(in_ram(*store, blocks), 10u);
  env_.release_writes();
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(store->trim_ram(0), 16 * kPage);
  expect_chain(*store, blocks, one_page());
}

TEST_F(StoreArena, WhatIsYetToBeWrittenIsWrittenFirst) {
  options_.write = WritePolicy::back;
  const auto store = open();
  const auto blocks = chain(10, 4);
  put_chain(*store, blocks, one_page());
  EXPECT_EQ(store->stats().written_parts, 0u);
  EXPECT_EQ(store->trim_ram(0), 0u);
  ASSERT_TRUE(soon([&] { return store->stats().written_parts == 10; }));
  EXPECT_TRUE(soon([&] { return store->trim_ram(0), store->stats().ram_bytes == 0; }));
  expect_chain(*store, blocks, one_page());
}

TEST_F(StoreArena, ALargePartFindsAPlaceAmongSmallOnes) {
  options_.write = WritePolicy::ram_only;
  const auto store = open();
  std::uint32_t salt = 0;
  for (const int size : {7, 9, 30, 64}) {
    // Every page is in use, and what is old lies everywhere.
    std::vector<Block> small;
    for (int i = 0; i < 64; ++i) {
      small.push_back(chain(1, 4, ++salt)[0]);
      put_chain(*store, {small.back()}, one_page());
    }
    for (int i = 0; i < 64; i += 3) store->touch(small[static_cast<std::size_t>(i)].key, Part::kv);
    const auto large = chain(1, 4, ++salt);
    put_chain(*store, large, pages(size));
    expect_chain(*store, large, pages(size));
    EXPECT_LE(store->stats().ram_peak_bytes, options_.ram_bytes);
    for (const auto& block : small) {
      if (has(*store, block)) expect_chain(*store, {block}, one_page());
    }
  }
}

TEST_F(StoreArena, ALargePartGetsNoPlaceOfItsOwnChain) {
  options_.write = WritePolicy::ram_only;
  const auto store = open();
  const auto blocks = chain(64, 4);
  put_chain(*store, blocks, one_page());
  const auto next = chain(1, 4, 7, blocks.back().key, blocks.back().depth)[0];
  EXPECT_EQ(put_block(*store, next, pages(9)).code(), StatusCode::Full);
  EXPECT_EQ(found(*store, blocks), 64u);
  expect_chain(*store, blocks, one_page());
}

TEST_F(StoreArena, RowsAreRightWhileMemoryIsTrimmed) {
  const auto store = open();
  const auto blocks = chain(24, 4);
  put_chain(*store, blocks, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  std::thread trimmer([&] {
    for (int i = 0; i < 100; ++i) store->trim_ram(static_cast<std::uint64_t>(i % 24) * kPage);
  });
  std::thread writer([&] {
    for (std::uint32_t i = 1; i < 50; ++i) put_chain(*store, chain(2, 4, i), one_page());
  });
  for (int i = 0; i < 20; ++i) expect_chain(*store, blocks, one_page());
  trimmer.join();
  writer.join();
  ASSERT_TRUE(store->flush().is_ok());
  store->trim_ram(0);
  EXPECT_EQ(store->stats().ram_bytes, 0u);
}

TEST_F(StoreArena, AClosedStoreHoldsNoMemory) {
  const std::uint64_t before = mlx::core::get_active_memory();
  for (const auto write : {WritePolicy::through, WritePolicy::ram_only}) {
    options_.write = write;
    const auto store = open();
    put_chain(*store, chain(10, 4), one_page());
    EXPECT_EQ(store->stats().ram_bytes, 16 * kPage);
    EXPECT_GE(mlx::core::get_active_memory(), before + 16 * kPage);
    ASSERT_TRUE(store->close().is_ok());
    EXPECT_EQ(store->stats().ram_bytes, 0u);
    EXPECT_EQ(mlx::core::get_active_memory(), before);
  }
}

// Random puts of mixed sizes, hits, erasures and trims: rows are those of their keys, and what MLX has given out is
// what is counted.
class ArenaChurn : public StoreArena, public ::testing::WithParamInterface<WritePolicy> {
 protected:
  struct Stored {
    Block block;
    std::vector<testing::SlotSpec> specs;
  };

  void expect_within_bound(const BlockStore& store) const {
    const auto stats = store.stats();
    const std::uint64_t active = mlx::core::get_active_memory() - active_before_;
    EXPECT_LE(stats.ram_peak_bytes, options_.ram_bytes);
    EXPECT_GE(active, stats.ram_bytes);
    EXPECT_LE(active, stats.ram_bytes + stats.ram_bytes / 50);
  }

  const std::uint64_t active_before_ = mlx::core::get_active_memory();
  std::mt19937 random_{12};
  std::vector<Stored> stored_;
};

TEST_P(ArenaChurn, RowsAndBoundsHold) {
  options_.write = GetParam();
  const auto store = open();
  const Part parts[] = {Part::kv};
  int hits = 0;
  for (std::uint32_t i = 0; i < 200 && !HasFailure(); ++i) {
    const auto kind = random_() % 16;
    // Of the last ones: many of them are still there.
    const std::size_t back = 1 + random_() % std::max<std::size_t>(1, std::min<std::size_t>(stored_.size(), 12));
    Stored* any = stored_.empty() ? nullptr : &stored_[stored_.size() - back];
    if (kind < 8) {
      // Mostly of one size, as the blocks of a model are, with tails and a few large ones.
      const int size = kind < 4 ? 5 : static_cast<int>(1 + random_() % (kind < 7 ? 5 : 20));
      stored_.push_back({chain(1, 4, i)[0], pages(size)});
      const Status status = put_block(*store, stored_.back().block, stored_.back().specs);
      ASSERT_TRUE(status.is_ok()) << status.message();
      expect_chain(*store, {stored_.back().block}, stored_.back().specs);
    } else if (kind < 13 && any != nullptr) {
      if (!has(*store, any->block)) continue;
      expect_chain(*store, {any->block}, any->specs);
      ++hits;
    } else if (kind < 15 && any != nullptr) {
      ASSERT_TRUE(store->erase(std::vector<Key>{any->block.key}, parts).is_ok());
      EXPECT_FALSE(has(*store, any->block));
    } else {
      const std::uint64_t target = random_() % options_.ram_bytes;
      if (GetParam() != WritePolicy::ram_only) store->flush();
      store->trim_ram(target);
      EXPECT_LE(store->stats().ram_bytes, target);
    }
    expect_within_bound(*store);
  }
  EXPECT_GT(hits, 10);
  EXPECT_GT(store->stats().evicted_ram_parts, 0u);
  for (const auto& [block, specs] : stored_) {
    if (has(*store, block)) expect_chain(*store, {block}, specs);
  }
  ASSERT_TRUE(store->close().is_ok());
  EXPECT_EQ(mlx::core::get_active_memory(), active_before_);
}

INSTANTIATE_TEST_SUITE_P(Policies, ArenaChurn,
                         ::testing::Values(WritePolicy::through, WritePolicy::back, WritePolicy::ram_only),
                         [](const auto& info) {
                           return std::string(info.param == WritePolicy::through ? "through"
                                              : info.param == WritePolicy::back  ? "back"
                                                                                 : "ram_only");
                         });

}  // namespace
}  // namespace prefixcache
