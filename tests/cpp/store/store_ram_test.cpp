// Memory given back on demand: in which order, and what stays.
#include <functional>
#include <thread>
#include <vector>

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
using testing::request_for;

class StoreRam : public testing::StoreFixture {
 protected:
  StoreRam() { options_.ram_bytes = 64 * kPage; }
};

TEST_F(StoreRam, TrimDropsTheLeastRecentlyUsedAndTheDeepestFirst) {
  options_.write = WritePolicy::ram_only;
  const auto store = open();
  const auto old = chain(4, 4);
  const auto recent = chain(4, 4, 1);
  put_chain(*store, old, one_page());
  put_chain(*store, recent, one_page());
  store->touch(old.back().key, Part::kv);

  EXPECT_EQ(store->trim_ram(6 * kPage), 2 * kPage);
  EXPECT_EQ(found(*store, recent), 2u);
  EXPECT_EQ(found(*store, old), 4u);
  EXPECT_EQ(store->trim_ram(3 * kPage), 3 * kPage);
  EXPECT_FALSE(has(*store, recent[0]));
  EXPECT_EQ(found(*store, old), 3u);
  expect_chain(*store, {old.begin(), old.begin() + 3}, one_page());
  EXPECT_EQ(store->trim_ram(3 * kPage), 0u);
  EXPECT_EQ(store->stats().ram_bytes, 3 * kPage);
  EXPECT_EQ(store->stats().evicted_ram_parts, 5u);
  EXPECT_EQ(store->trim_ram(0), 3 * kPage);
  EXPECT_EQ(store->stats().ram_bytes, 0u);
  EXPECT_EQ(store->stats().parts, 0u);
}

TEST_F(StoreRam, WhatIsOnDiskIsServedFromThere) {
  const auto store = open();
  const auto blocks = chain(4, 4);
  put_chain(*store, blocks, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(store->trim_ram(kPage), 3 * kPage);
  EXPECT_EQ(in_ram(*store, blocks), 1u);
  expect_chain(*store, blocks, one_page());
  EXPECT_EQ(store->trim_ram(0), kPage);
  expect_chain(*store, blocks, one_page());
  EXPECT_EQ(store->stats().parts, 4u);
}

TEST_F(StoreRam, RecycledMemoryGoesFirst) {
  options_.write = WritePolicy::ram_only;
  const auto store = open();
  const auto blocks = chain(4, 4);
  put_chain(*store, blocks, one_page());
  const std::vector<Key> gone = {blocks[3].key, blocks[2].key};
  const Part parts[] = {Part::kv};
  ASSERT_TRUE(store->erase(gone, parts).is_ok());
  EXPECT_EQ(store->stats().ram_bytes, 4 * kPage);
  EXPECT_EQ(store->trim_ram(2 * kPage), 2 * kPage);
  EXPECT_EQ(found(*store, blocks), 2u);
}

TEST_F(StoreRam, WhatWaitsToBeWrittenStays) {
  env_.hold_writes();
  const auto store = open();
  const auto blocks = chain(3, 4);
  put_chain(*store, blocks, one_page());
  env_.wait_for_write();
  EXPECT_EQ(store->trim_ram(0), 0u);
  EXPECT_EQ(in_ram(*store, blocks), 3u);
  env_.release_writes();
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(store->trim_ram(0), 3 * kPage);
  expect_chain(*store, blocks, one_page());
}

TEST_F(StoreRam, WhatFoundNoPlaceOnTheDiskStays) {
  env_.write_error = ENOSPC;
  const auto store = open();
  const auto blocks = chain(3, 4);
  put_chain(*store, blocks, one_page());
  store->flush();
  EXPECT_EQ(store->trim_ram(0), 0u);
  expect_chain(*store, blocks, one_page());
}

TEST_F(StoreRam, ProtectedBlocksStayInEveryPartAndGroup) {
  options_.write = WritePolicy::ram_only;
  const auto store = open();
  const auto blocks = chain(2, 4);
  const auto others = chain(2, 4, 1);
  put_chain(*store, blocks, one_page());
  for (const auto& block : blocks) {
    ASSERT_TRUE(testing::put_window(*store, block, block.start(), block.depth, 7, one_page()).is_ok());
  }
  put_chain(*store, others, one_page());
  const auto kept = testing::keys_of(blocks);
  EXPECT_EQ(store->trim_ram(0, kept), 2 * kPage);
  EXPECT_EQ(store->stats().parts, 4u);
  EXPECT_EQ(found(*store, blocks), 2u);
  EXPECT_FALSE(has(*store, others[0]));
  const auto window = store->presence(std::vector<Key>{group_key(blocks[1].key, 7)});
  EXPECT_TRUE(window[0].parts[1].in_ram);
  EXPECT_EQ(store->trim_ram(0), 4 * kPage);
}

TEST_F(StoreRam, RowsAreRightWhileMemoryIsTrimmed) {
  const auto store = open();
  const auto blocks = chain(8, 4);
  put_chain(*store, blocks, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  std::thread trimmer([&] {
    for (int i = 0; i < 200; ++i) store->trim_ram(static_cast<std::uint64_t>(i % 8) * kPage);
  });
  for (int i = 0; i < 50; ++i) expect_chain(*store, blocks, one_page());
  trimmer.join();
  EXPECT_LE(store->trim_ram(0), 8 * kPage);
  EXPECT_EQ(store->stats().ram_bytes, 0u);
}

TEST_F(StoreRam, AClosedStoreHoldsNoMemory) {
  for (const auto write : {WritePolicy::through, WritePolicy::ram_only}) {
    options_.write = write;
    const auto store = open();
    put_chain(*store, chain(4, 4), one_page());
    EXPECT_EQ(store->stats().ram_bytes, 4 * kPage);
    ASSERT_TRUE(store->close().is_ok());
    EXPECT_EQ(store->stats().ram_bytes, 0u);
    EXPECT_EQ(store->trim_ram(0), 0u);
  }
}

}  // namespace
}  // namespace prefixcache
