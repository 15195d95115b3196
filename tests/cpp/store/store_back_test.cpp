// Write policy back: files are written when parts leave the RAM, at flush and at close.
#include <filesystem>
#include <thread>

#include <gtest/gtest.h>

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

class StoreBack : public testing::StoreFixture {
 protected:
  StoreBack() {
    options_.write = WritePolicy::back;
    options_.ram_bytes = 8 * kPage;
  }
};

TEST_F(StoreBack, NothingIsWrittenBeforeItMustBe) {
  const auto blocks = chain(6, 4);
  {
    const auto store = open();
    put_chain(*store, blocks, one_page());
    expect_chain(*store, blocks, one_page());
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    EXPECT_TRUE(dir_.parts().empty());
    EXPECT_EQ(store->stats().queued_bytes, 0u);
    // What is erased before is never written.
    const std::vector<Part> kv = {Part::kv};
    ASSERT_TRUE(store->erase(std::vector<Key>{blocks[5].key}, kv).is_ok());
    ASSERT_TRUE(store->flush().is_ok());
    EXPECT_EQ(dir_.parts().size(), 5u);
    EXPECT_EQ(store->stats().written_parts, 5u);
    put_chain(*store, blocks, one_page());
    ASSERT_TRUE(store->flush().is_ok());
    EXPECT_EQ(store->stats().written_parts, 6u) << "nothing is written twice";
    put_chain(*store, chain(2, 4, 1), one_page());
    EXPECT_EQ(dir_.parts().size(), 6u);
  }
  EXPECT_EQ(dir_.parts().size(), 8u) << "close wrote the rest";
  const auto store = open();
  expect_chain(*store, blocks, one_page());
  expect_chain(*store, chain(2, 4, 1), one_page());
}

TEST_F(StoreBack, WhatLeavesTheRamIsOnDiskFirst) {
  const auto store = open();
  for (std::uint32_t i = 0; i < 12; ++i) {
    put_chain(*store, chain(2, 4, i), one_page());
    EXPECT_LE(store->stats().ram_peak_bytes, options_.ram_bytes);
  }
  EXPECT_GE(dir_.parts().size(), 16u);
  EXPECT_LT(dir_.parts().size(), 24u) << "the newest are in RAM only";
  for (std::uint32_t i = 0; i < 12; ++i) expect_chain(*store, chain(2, 4, i), one_page());
  EXPECT_EQ(store->stats().put_full, 0u);
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(store->stats().written_parts, 24u);
}

TEST_F(StoreBack, WhatIsOnDiskIsAlwaysAPrefix) {
  // The deepest block leaves the RAM first; a kill then must not leave it alone on the disk.
  const auto old = chain(6, 4, 1);
  const auto store = open();
  put_chain(*store, old, one_page());
  put_chain(*store, chain(3, 4, 2), one_page());
  options_.name_space = "test";
  const auto after_kill = open();
  EXPECT_EQ(found(*after_kill, old), dir_.parts().size());
  EXPECT_GT(dir_.parts().size(), 0u);
}

TEST_F(StoreBack, WindowsAndStatesAreWrittenBehindTheirBlocks) {
  const auto blocks = chain(2, 4);
  const auto store = open();
  put_chain(*store, blocks, one_page());
  for (const auto& block : blocks) {
    ASSERT_TRUE(testing::put_window(*store, block, block.start(), block.depth, 3, one_page()).is_ok());
  }
  ASSERT_TRUE(testing::put_state(*store, blocks[1]).is_ok());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(dir_.parts().size(), 5u);
}

TEST_F(StoreBack, AnEntryAboveTheRamBoundGoesToDiskAndEvictsNothing) {
  const auto store = open();
  const auto blocks = chain(3, 4);
  put_chain(*store, blocks, one_page());
  const std::vector<testing::SlotSpec> large = {{"keys", mlx::core::uint8, {0, 200000}, 0}};
  const auto block = chain(1, 4, 1)[0];
  ASSERT_TRUE(put_block(*store, block, large).is_ok());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(store->stats().evicted_ram_parts, 0u);
  EXPECT_EQ(store->stats().parts_in_ram, 3u);
  expect_chain(*store, {block}, large);
}

TEST_F(StoreBack, AFailingDiskMakesTheOldestGoForGood) {
  options_.put_wait_seconds = 0.5;
  const auto store = open();
  env_.write_error = EIO;
  for (std::uint32_t i = 0; i < 12; ++i) {
    // One may find the disk broken before the store knows.
    const auto block = chain(1, 4, i);
    if (!put_block(*store, block[0], one_page()).is_ok()) {
      ASSERT_TRUE(put_block(*store, block[0], one_page()).is_ok());
    }
    expect_chain(*store, block, one_page());
  }
  EXPECT_TRUE(store->stats().degraded);
  EXPECT_LE(store->stats().parts, 8u);
  env_.write_error = 0;
  ASSERT_TRUE(store->flush().is_ok() || store->flush().is_ok());
  EXPECT_FALSE(store->stats().degraded);
  EXPECT_EQ(dir_.parts().size(), store->stats().parts);
}

TEST_F(StoreBack, TrimWritesWhatIsToGo) {
  const auto store = open();
  const auto blocks = chain(4, 4);
  put_chain(*store, blocks, one_page());
  EXPECT_EQ(store->trim_ram(0), 0u);
  while (dir_.parts().size() < 4) std::this_thread::yield();
  std::uint64_t freed = 0;
  for (int i = 0; i < 1000 && freed < 4 * kPage; ++i) {
    freed += store->trim_ram(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(freed, 4 * kPage);
  expect_chain(*store, blocks, one_page());
}

}  // namespace
}  // namespace prefixcache
