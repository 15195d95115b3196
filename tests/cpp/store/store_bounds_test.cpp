// What is kept and what goes when RAM, queue or disk are full.
#include "prefixcache/block_store.h"

#include <chrono>
#include <filesystem>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "support/store_fixture.h"

namespace prefixcache {
namespace {

namespace fs = std::filesystem;
using testing::Block;
using testing::chain;
using testing::expect_chain;
using testing::expect_rows;
using testing::kPage;
using testing::one_page;
using testing::put_block;
using testing::put_chain;
using testing::request_for;

using StoreBounds = testing::StoreFixture;

TEST_F(StoreBounds, TheRamBoundHoldsUnderChurn) {
  std::mt19937 random(9);
  for (const auto write : {WritePolicy::through, WritePolicy::ram_only}) {
    options_.write = write;
    options_.ram_bytes = 1 << 20;
    const auto store = open();
    for (int i = 0; i < 150; ++i) {
      const int width = 1 + static_cast<int>(random() % 60000);
      const std::vector<testing::SlotSpec> specs = {{"keys", mlx::core::uint8, {0, width}, 0}};
      const auto block = chain(1, 1 + static_cast<int>(random() % 8), static_cast<std::uint32_t>(random()))[0];
      const Status status = put_block(*store, block, specs);
      ASSERT_TRUE(status.is_ok()) << status.message();
      const auto stats = store->stats();
      EXPECT_LE(stats.ram_bytes, options_.ram_bytes);
      EXPECT_LE(stats.ram_peak_bytes, options_.ram_bytes);
      expect_rows(store->load(block.key, Part::kv), {block}, 0, block.depth, -1, specs);
    }
    EXPECT_GT(store->stats().evicted_ram_parts, 0u);
    if (write == WritePolicy::through) {
      EXPECT_EQ(store->stats().parts, 150u);
    }
  }
}

TEST_F(StoreBounds, AnEntryAboveTheRamBoundEvictsNothing) {
  options_.ram_bytes = 4 * kPage;
  options_.write = WritePolicy::ram_only;
  auto store = open();
  const auto blocks = chain(3, 4);
  put_chain(*store, blocks, one_page());
  const std::vector<testing::SlotSpec> large = {{"keys", mlx::core::uint8, {0, 100000}, 0}};
  const auto block = chain(1, 4, 1)[0];
  EXPECT_EQ(put_block(*store, block, large).code(), StatusCode::Full);
  EXPECT_EQ(store->stats().put_full, 1u);
  EXPECT_EQ(store->stats().evicted_ram_parts, 0u);
  expect_chain(*store, blocks, one_page());
  EXPECT_FALSE(has(*store, block));

  // With a disk it goes there, past the RAM tier.
  options_.write = WritePolicy::through;
  store = open();
  put_chain(*store, blocks, one_page());
  EXPECT_TRUE(put_block(*store, block, large).is_ok());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(store->stats().evicted_ram_parts, 0u);
  EXPECT_EQ(store->stats().parts_in_ram, 3u);
  const auto gathered = store->load(block.key, Part::kv);
  expect_rows(gathered, {block}, 0, 4, -1, large);
  EXPECT_EQ(gathered.disk_blocks, 1u);
}

TEST_F(StoreBounds, WhatLeavesTheRamIsReadFromTheDisk) {
  options_.ram_bytes = 3 * kPage;
  const auto store = open();
  const auto blocks = chain(8, 4);
  put_chain(*store, blocks, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_LE(store->stats().parts_in_ram, 3u);
  const auto gathered = store->gather(request_for(blocks));
  expect_rows(gathered, blocks, 0, 32, -1, one_page());
  EXPECT_EQ(gathered.ram_blocks + gathered.disk_blocks, 8u);
  EXPECT_GE(gathered.disk_blocks, 5u);
  EXPECT_EQ(gathered.ram_bytes + gathered.disk_bytes, 8 * kPage);
}

TEST_F(StoreBounds, AHitKeepsItsWholeChain) {
  options_.write = WritePolicy::ram_only;
  options_.ram_bytes = 6 * kPage;
  const auto store = open();
  const auto a = chain(3, 4, 1), b = chain(3, 4, 2), c = chain(2, 4, 3);
  put_chain(*store, a, one_page());
  put_chain(*store, b, one_page());
  expect_chain(*store, a, one_page());
  put_chain(*store, c, one_page());
  EXPECT_EQ(found(*store, a), 3u);
  EXPECT_EQ(found(*store, b), 1u) << "the deepest blocks of the oldest chain went first";
  EXPECT_EQ(found(*store, c), 2u);
}

TEST_F(StoreBounds, AChainLongerThanTheRamKeepsItsBeginning) {
  options_.write = WritePolicy::ram_only;
  options_.ram_bytes = 4 * kPage;
  const auto store = open();
  const auto old = chain(2, 4, 1), blocks = chain(7, 4, 2);
  put_chain(*store, old, one_page());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(put_block(*store, blocks[i], one_page()).code(), i < 4 ? StatusCode::Ok : StatusCode::Full) << i;
  }
  EXPECT_EQ(found(*store, blocks), 4u);
  expect_chain(*store, {blocks.begin(), blocks.begin() + 4}, one_page());
  EXPECT_EQ(found(*store, old), 0u);
}

TEST_F(StoreBounds, ExtendingTheOldestChainKeepsIt) {
  options_.write = WritePolicy::ram_only;
  options_.ram_bytes = 4 * kPage;
  const auto store = open();
  const auto a = chain(4, 4, 1), b = chain(2, 4, 2);
  put_chain(*store, {a[0], a[1]}, one_page());
  put_chain(*store, b, one_page());
  put_chain(*store, {a[2], a[3]}, one_page());
  EXPECT_EQ(found(*store, a), 4u);
  EXPECT_EQ(found(*store, b), 0u);
}

// Random stores and hits over a tree of blocks: a block that is there has all blocks before it.
class Survivors : public StoreBounds {
 protected:
  void run(std::uint32_t seed) {
    const auto store = open();
    std::mt19937 random(seed);
    std::vector<Block> tree;
    std::map<Key, const Block*> by_key;
    for (int i = 0; i < 40; ++i) {
      const Block* parent = tree.empty() || random() % 4 == 0 ? nullptr : &tree[random() % tree.size()];
      tree.push_back(parent == nullptr ? chain(1, 4, static_cast<std::uint32_t>(i))[0]
                                       : chain(1, 4, static_cast<std::uint32_t>(i), parent->key, parent->depth)[0]);
    }
    for (const auto& block : tree) by_key[block.key] = &block;
    for (int step = 0; step < 120; ++step) {
      // A request: the chain from the root to some block.
      std::vector<Block> line;
      for (const Block* at = &tree[random() % tree.size()]; at != nullptr;) {
        line.insert(line.begin(), *at);
        const auto up = by_key.find(at->parent);
        at = up == by_key.end() ? nullptr : up->second;
      }
      const std::size_t hit = found(*store, line);
      if (hit > 0 && random() % 2 == 0) {
        const std::vector<Block> prefix(line.begin(), line.begin() + static_cast<long>(hit));
        expect_chain(*store, prefix, one_page());
      }
      for (std::size_t i = hit; i < line.size(); ++i) {
        if (!put_block(*store, line[i], one_page()).is_ok()) break;
      }
      if (options_.write == WritePolicy::through) {
        ASSERT_TRUE(store->flush().is_ok() || store->stats().write_errors > 0);
      }
      if (trims_ && random() % 8 == 0) store->trim_ram(random() % options_.ram_bytes);
      for (const auto& block : tree) {
        if (!has(*store, block) || !by_key.contains(block.parent)) continue;
        ASSERT_TRUE(has(*store, *by_key[block.parent])) << "step " << step << ": an orphan at depth " << block.depth;
      }
      if (options_.write == WritePolicy::through) {
        ASSERT_LE(dir_.bytes(), options_.disk_bytes);
        ASSERT_EQ(store->stats().disk_bytes, dir_.bytes());
      }
    }
  }

  bool trims_ = false;
};

TEST_F(Survivors, OfTheRamTierArePrefixes) {
  options_.write = WritePolicy::ram_only;
  options_.ram_bytes = 9 * kPage;
  for (std::uint32_t seed = 0; seed < 4; ++seed) run(seed);
}

TEST_F(Survivors, OfTrimsArePrefixes) {
  options_.write = WritePolicy::ram_only;
  trims_ = true;
  for (const bool arena : {false, true}) {
    arena_ = arena;
    for (const std::uint64_t pages : {9, 20}) {
      options_.ram_bytes = pages * kPage;
      for (std::uint32_t seed = 0; seed < 3; ++seed) run(seed);
    }
  }
}

TEST_F(Survivors, OfTheDiskArePrefixes) {
  options_.disk_bytes = 9 * (kPage + 1024);
  for (std::uint32_t seed = 0; seed < 3; ++seed) {
    options_.directory = dir_ / ("store");
    fs::remove_all(options_.directory);
    run(seed);
  }
}

TEST_F(StoreBounds, AFullQueueDropsTheNewestSuffix) {
  options_.queue_bytes = 3 * kPage;
  options_.put_wait_seconds = 0.05;
  const auto store = open();
  env_.hold_writes();
  const auto blocks = chain(6, 4);
  const auto before = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < 6; ++i) {
    const Status status = put_block(*store, blocks[i], one_page());
    EXPECT_EQ(status.code(), i < 3 ? StatusCode::Ok : StatusCode::Full) << i;
  }
  EXPECT_GE(std::chrono::steady_clock::now() - before, std::chrono::milliseconds(3 * 50));
  EXPECT_EQ(store->stats().put_full, 3u);
  EXPECT_EQ(store->stats().queued_bytes, 3 * kPage);
  // What waits is served.
  expect_chain(*store, {blocks[0], blocks[1], blocks[2]}, one_page());
  env_.release_writes();
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(found(*store, blocks), 3u);
  put_chain(*store, blocks, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  expect_chain(*store, blocks, one_page());
}

TEST_F(StoreBounds, PutWaitsForRoomInTheQueue) {
  options_.queue_bytes = 2 * kPage;
  options_.put_wait_seconds = 60;
  const auto store = open();
  env_.hold_writes();
  const auto blocks = chain(3, 4);
  put_chain(*store, {blocks[0], blocks[1]}, one_page());
  std::thread release([&] {
    env_.wait_for_write();
    env_.release_writes();
  });
  EXPECT_TRUE(put_block(*store, blocks[2], one_page()).is_ok());
  release.join();
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(dir_.parts().size(), 3u);
}

TEST_F(StoreBounds, CloseWritesWhatWaits) {
  const auto blocks = chain(6, 8);
  {
    const auto store = open();
    put_chain(*store, blocks);
  }
  EXPECT_EQ(dir_.parts().size(), 6u);
  expect_chain(*open(), blocks);
}

TEST_F(StoreBounds, TheDiskBoundHolds) {
  options_.disk_bytes = 5 * (kPage + 1024);
  const auto store = open();
  for (std::uint32_t i = 0; i < 12; ++i) {
    put_chain(*store, chain(1, 4, i), one_page());
    ASSERT_TRUE(store->flush().is_ok());
    EXPECT_LE(dir_.bytes(), options_.disk_bytes);
    EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
  }
  EXPECT_EQ(store->stats().evicted_disk_parts, 7u);
  EXPECT_EQ(dir_.parts().size(), 5u);
  for (std::uint32_t i = 7; i < 12; ++i) expect_chain(*store, chain(1, 4, i), one_page());
}

TEST_F(StoreBounds, AChainLongerThanTheDiskKeepsItsBeginning) {
  options_.disk_bytes = 4 * (kPage + 1024);
  const auto store = open();
  const auto blocks = chain(7, 4);
  for (const auto& block : blocks) {
    put_block(*store, block, one_page());
    store->flush();
  }
  EXPECT_EQ(found(*store, blocks), 4u);
  expect_chain(*store, {blocks.begin(), blocks.begin() + 4}, one_page());
  EXPECT_LE(dir_.bytes(), options_.disk_bytes);
}

TEST_F(StoreBounds, FilesOfOtherNamespacesGoFirst) {
  const auto foreign = chain(3, 4, 1), own = chain(5, 4, 2);
  options_.name_space = "other";
  prepare(foreign, one_page());
  options_.name_space = "test";
  options_.disk_bytes = 5 * (kPage + 1024);
  const auto store = open();
  for (std::size_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(put_block(*store, own[i], one_page()).is_ok());
    ASSERT_TRUE(store->flush().is_ok());
    EXPECT_LE(dir_.bytes(), options_.disk_bytes);
    EXPECT_EQ(found(*store, own), i + 1);
  }
  EXPECT_EQ(store->stats().evicted_disk_parts, 0u);
  EXPECT_EQ(dir_.parts().size(), 5u);
}

TEST_F(StoreBounds, AFileAboveTheDiskBoundEvictsNothing) {
  const auto foreign = chain(1, 4, 1), own = chain(1, 4, 2), large = chain(1, 4, 3);
  options_.name_space = "other";
  prepare(foreign);
  options_.name_space = "test";
  options_.disk_bytes = kPage;
  const auto store = open();
  put_chain(*store, own);
  ASSERT_TRUE(store->flush().is_ok());
  put_block(*store, large[0], one_page());
  EXPECT_TRUE(store->flush().is_ok());
  EXPECT_EQ(store->stats().left_out_parts, 1u);
  EXPECT_EQ(store->stats().write_errors, 0u) << "a bound is no error";
  EXPECT_FALSE(store->stats().degraded);
  EXPECT_FALSE(has(*store, large[0]));
  EXPECT_EQ(dir_.parts().size(), 2u);
  expect_chain(*store, own);
}

TEST_F(StoreBounds, RecencyOfChainsSurvivesARestart) {
  const auto a = chain(2, 4, 1), b = chain(2, 4, 2), c = chain(1, 4, 3);
  prepare(a, one_page());
  prepare(b, one_page());
  const auto now = fs::file_time_type::clock::now();
  // b is older, though its first block is the newest file of all but a's last.
  fs::last_write_time(file_of(a[0]), now - std::chrono::hours(9));
  fs::last_write_time(file_of(a[1]), now - std::chrono::hours(1));
  fs::last_write_time(file_of(b[0]), now - std::chrono::hours(2));
  fs::last_write_time(file_of(b[1]), now - std::chrono::hours(3));
  options_.disk_bytes = 4 * (kPage + 1024);
  const auto store = open();
  put_chain(*store, c, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(found(*store, a), 2u);
  EXPECT_EQ(found(*store, b), 1u);
}

TEST_F(StoreBounds, OldTemporaryFilesAreRemovedAtOpen) {
  prepare(chain(1, 4));
  const fs::path folder = dir_.parts()[0].parent_path();
  testing::write_file(folder / ".tmp-99-1", "abandoned");
  options_.temp_grace_seconds = 3600;
  open();
  EXPECT_EQ(dir_.files().size(), 2u);
  options_.temp_grace_seconds = 0;
  env_.clock_offset = 1;
  open();
  EXPECT_EQ(dir_.files().size(), 1u);
}

}  // namespace
}  // namespace prefixcache
