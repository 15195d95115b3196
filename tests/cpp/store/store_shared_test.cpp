// One directory, several stores: caps, evictions, files that others wrote, used or removed.
#include <chrono>
#include <filesystem>
#include <functional>
#include <thread>

#include <gtest/gtest.h>

#include "support/stalling_env.h"
#include "support/store_fixture.h"

namespace prefixcache {
namespace {

namespace fs = std::filesystem;
using std::chrono::steady_clock;
using testing::Block;
using testing::chain;
using testing::expect_chain;
using testing::kPage;
using testing::one_page;
using testing::put_block;
using testing::put_chain;

class StoreShared : public testing::StoreFixture {
 protected:
  static constexpr std::uint64_t kFile = kPage + 1024;  // a little more than a part's file

  std::unique_ptr<BlockStore> open_as(const std::string& name_space) {
    options_.name_space = name_space;
    return open();
  }
  void age(const std::vector<Block>& blocks, int hours) {
    for (const auto& block : blocks) {
      fs::last_write_time(file_of(block), fs::file_time_type::clock::now() - std::chrono::hours(hours));
    }
  }
  double hours_old(const Block& block) {
    const auto age = fs::file_time_type::clock::now() - fs::last_write_time(file_of(block));
    return std::chrono::duration<double>(age).count() / 3600;
  }
};

TEST_F(StoreShared, TheCapIsForAllNamespacesTogether) {
  options_.disk_bytes = 6 * kFile;
  const auto a = open_as("a"), b = open_as("b");
  for (std::uint32_t i = 0; i < 10; ++i) {
    for (auto* store : {a.get(), b.get()}) {
      const auto block = chain(1, 4, i + (store == b.get() ? 1000 : 0));
      put_chain(*store, block, one_page());
      ASSERT_TRUE(store->flush().is_ok());
      EXPECT_LE(dir_.bytes(), options_.disk_bytes);
      EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
      expect_chain(*store, block, one_page());
    }
  }
  EXPECT_EQ(dir_.parts().size(), 6u);
  EXPECT_EQ(a->stats().corrupt_parts + b->stats().corrupt_parts, 0u);
}

TEST_F(StoreShared, TheOldestOfAllGoesFirst) {
  const auto own = chain(2, 4, 1), foreign = chain(2, 4, 2), newcomer = chain(2, 4, 3);
  options_.name_space = "other";
  prepare(foreign, one_page());
  options_.name_space = "test";
  prepare(own, one_page());
  age(own, 5);
  age(foreign, 3);
  options_.disk_bytes = 4 * kFile;
  const auto store = open();
  put_chain(*store, {newcomer[0]}, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_TRUE(file_of(own[1]).empty()) << "the deepest block of the oldest chain";
  EXPECT_FALSE(file_of(own[0]).empty());
  // What was used since this store looked is no longer the oldest.
  age(foreign, 0);
  put_chain(*store, {newcomer[1]}, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_TRUE(file_of(own[0]).empty());
  EXPECT_FALSE(file_of(foreign[0]).empty());
  EXPECT_FALSE(file_of(foreign[1]).empty());
}

TEST_F(StoreShared, WhatAnotherProcessOfThisNamespaceUsedStays) {
  const auto a = chain(2, 4, 1), b = chain(2, 4, 2);
  prepare(a, one_page());
  prepare(b, one_page());
  age(a, 5);
  age(b, 3);
  options_.disk_bytes = 4 * kFile;
  const auto store = open();
  age(a, 0);
  put_chain(*store, chain(1, 4, 3), one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(found(*store, a), 2u);
  EXPECT_EQ(found(*store, b), 1u);
}

TEST_F(StoreShared, WhatOneEvictsIsAMissForTheOther) {
  options_.disk_bytes = 3 * kFile;
  const auto a = open_as("a");
  const auto blocks = chain(2, 4);
  put_chain(*a, blocks, one_page());
  ASSERT_TRUE(a->flush().is_ok());
  const auto b = open_as("b");
  env_.clock_offset = 3600;
  for (std::uint32_t i = 0; i < 3; ++i) {
    put_chain(*b, chain(1, 4, 10 + i), one_page());
    ASSERT_TRUE(b->flush().is_ok());
  }
  EXPECT_EQ(dir_.parts().size(), 3u);
  const auto gathered = a->gather(testing::request_for(blocks));
  EXPECT_EQ(gathered.status.code(), StatusCode::NotFound);
  EXPECT_EQ(found(*a, blocks), 0u);
  EXPECT_EQ(a->stats().lost_parts, 2u);
  put_chain(*a, blocks, one_page());
  ASSERT_TRUE(a->flush().is_ok());
  expect_chain(*a, blocks, one_page());
  EXPECT_LE(dir_.bytes(), options_.disk_bytes);
}

TEST_F(StoreShared, RowsThatTookTheirPlaceWhenTheyWereGoneAreCountedInFull) {
  options_.disk_bytes = 3 * kFile;
  const auto a = open_as("a");
  const Block block = chain(1, 4)[0];
  ASSERT_TRUE(testing::put_window(*a, block, 1, 4, 7, one_page()).is_ok());
  ASSERT_TRUE(a->flush().is_ok());
  const auto b = open_as("b");
  env_.clock_offset = 3600;
  put_chain(*b, chain(3, 4, 1), one_page());
  ASSERT_TRUE(b->flush().is_ok());
  EXPECT_EQ(dir_.parts().size(), 3u) << "the rows of the window have gone";
  ASSERT_TRUE(testing::put_window(*a, block, 0, 4, 7, one_page()).is_ok());
  ASSERT_TRUE(a->flush().is_ok());
  EXPECT_LE(dir_.bytes(), options_.disk_bytes);
  EXPECT_EQ(a->stats().disk_bytes, dir_.bytes());
}

TEST_F(StoreShared, WhatOthersWroteSinceIsFoundBeforeAStoreIsFull) {
  options_.disk_bytes = 3 * kFile;
  const auto a = open_as("a"), b = open_as("b");
  put_chain(*a, chain(3, 4), one_page());
  ASSERT_TRUE(a->flush().is_ok());
  put_chain(*b, chain(3, 4, 1), one_page());
  ASSERT_TRUE(b->flush().is_ok());
  EXPECT_EQ(found(*b, chain(3, 4, 1)), 3u);
  EXPECT_EQ(dir_.parts().size(), 3u);
}

TEST_F(StoreShared, TheCapIsEnforcedAtOpen) {
  const auto a = chain(3, 4, 1), b = chain(3, 4, 2), other = chain(2, 4, 3);
  options_.name_space = "other";
  prepare(other, one_page());
  options_.name_space = "test";
  prepare(a, one_page());
  prepare(b, one_page());
  age(other, 9);
  age(a, 5);
  options_.disk_bytes = 4 * kFile;
  const auto store = open();
  EXPECT_LE(dir_.bytes(), options_.disk_bytes);
  EXPECT_EQ(dir_.parts().size(), 4u);
  EXPECT_EQ(found(*store, a), 1u);
  EXPECT_EQ(found(*store, b), 3u);
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
}

TEST_F(StoreShared, FilesOfNobodyAreCountedAndLeftAlone) {
  prepare(chain(1, 4), one_page());
  const fs::path folder = dir_.parts()[0].parent_path();
  const auto stray = folder / "notes.txt";
  testing::write_file(stray, std::string(2 * kPage, 'x'));
  testing::write_file(fs::path(options_.directory) / "readme", "12345");
  options_.disk_bytes = 4 * kFile;
  const auto store = open();
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
  for (std::uint32_t i = 0; i < 4; ++i) put_chain(*store, chain(1, 4, 7 + i), one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_LE(dir_.bytes(), options_.disk_bytes);
  EXPECT_TRUE(fs::exists(stray));
}

TEST_F(StoreShared, AFileRemovedByHandIsNoticedWhenItIsAskedFor) {
  const auto store = open();
  const auto blocks = chain(3, 4);
  put_chain(*store, blocks, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  fs::remove(file_of(blocks[1]));
  EXPECT_EQ(store->gather(testing::request_for(blocks)).good, 1u);
  EXPECT_EQ(found(*store, blocks), 1u);
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
  EXPECT_EQ(store->stats().lost_parts, 1u);
}

TEST_F(StoreShared, WhatWasRemovedByHandMakesNoRoomTwice) {
  options_.disk_bytes = 6 * kFile;
  const auto a = open_as("a");
  const auto blocks = chain(5, 4);
  put_chain(*a, blocks, one_page());
  ASSERT_TRUE(a->flush().is_ok());
  for (const auto& block : blocks) fs::remove(file_of(block));
  // The other one counts, and fills the room.
  const auto b = open_as("b");
  put_chain(*b, chain(6, 4, 1), one_page());
  ASSERT_TRUE(b->flush().is_ok());
  EXPECT_EQ(dir_.parts().size(), 6u);
  for (const auto& block : blocks) {
    EXPECT_EQ(a->gather(testing::request_for({block})).status.code(), StatusCode::NotFound);
  }
  for (std::uint32_t i = 0; i < 5; ++i) {
    put_chain(*b, chain(1, 4, 10 + i), one_page());
    ASSERT_TRUE(b->flush().is_ok());
    EXPECT_LE(dir_.bytes(), options_.disk_bytes);
  }
}

TEST_F(StoreShared, ATreeRemovedByHandIsNoticedAtTheNextWrite) {
  const auto store = open();
  const auto blocks = chain(3, 4);
  put_chain(*store, blocks, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  expect_chain(*store, blocks, one_page());
  fs::remove_all(options_.directory);
  const auto other = chain(1, 4, 1);
  put_chain(*store, other, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
  EXPECT_EQ(store->stats().lost_parts, 3u);
  EXPECT_EQ(found(*store, blocks), 0u);
  expect_chain(*store, other, one_page());
}

TEST_F(StoreShared, HitsDateTheFilesOfTheirChainForTheNextStart) {
  const auto a = chain(3, 4, 1), b = chain(3, 4, 2);
  prepare(a, one_page());
  prepare(b, one_page());
  age(a, 9);
  age(b, 3);
  {
    const auto store = open();
    expect_chain(*store, {a[0], a[1]}, one_page());
    ASSERT_TRUE(store->close().is_ok());
  }
  EXPECT_LT(hours_old(a[0]), 0.1);
  EXPECT_LT(hours_old(a[1]), 0.1);
  EXPECT_GT(hours_old(a[2]), 8);
  EXPECT_GT(hours_old(b[0]), 2);
  options_.disk_bytes = 6 * kFile;
  const auto store = open();
  put_chain(*store, chain(1, 4, 3), one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(found(*store, a), 2u) << "the block behind the hit is the oldest";
  EXPECT_EQ(found(*store, b), 3u);
  put_chain(*store, chain(1, 4, 4), one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(found(*store, a), 2u);
  EXPECT_EQ(found(*store, b), 2u);
}

TEST_F(StoreShared, AFileIsDatedOnceAMinuteAtMost) {
  const auto blocks = chain(1, 4);
  prepare(blocks, one_page());
  const auto written = fs::last_write_time(file_of(blocks[0]));
  const auto store = open();
  for (int i = 0; i < 3; ++i) {
    expect_chain(*store, blocks, one_page());
    std::this_thread::sleep_for(std::chrono::milliseconds(80));
  }
  EXPECT_EQ(fs::last_write_time(file_of(blocks[0])), written);
  env_.clock_offset = 61;
  expect_chain(*store, blocks, one_page());
  EXPECT_TRUE(soon([&] { return fs::last_write_time(file_of(blocks[0])) > written; }));
}

TEST_F(StoreShared, TailsAndStatesOfOthersAreFoundSoon) {
  const auto a = open(), b = open();
  const auto blocks = chain(2, 8);
  const auto tail = testing::tail_of(chain(1, 8, 5, blocks[1].key, blocks[1].depth)[0], 3);
  EXPECT_EQ(b->longest_child(blocks[1].key, 16, tail.tokens, {}, Part::kv).block_rows, 0);
  put_chain(*a, blocks, one_page());
  put_chain(*a, {tail}, one_page());
  ASSERT_TRUE(testing::put_state(*a, tail).is_ok());
  ASSERT_TRUE(a->flush().is_ok());
  EXPECT_EQ(found(*b, blocks), 2u) << "whole blocks are found at once";
  EXPECT_TRUE(soon([&] { return b->longest_child(blocks[1].key, 16, tail.tokens, {}, Part::kv).rows == 3; }));
  auto tokens = blocks[0].tokens;
  for (const auto* block : {&blocks[1], &tail}) tokens.insert(tokens.end(), block->tokens.begin(), block->tokens.end());
  const auto keys = testing::keys_of(blocks);
  const ChainView view{testing::test_root(), keys, 8, tokens, {}};
  EXPECT_TRUE(soon([&] { return b->deepest_state(view, 19).n == 19; }));
  // One more of another block, later.
  const auto next = chain(1, 8, 6, blocks[0].key, blocks[0].depth)[0];
  put_chain(*a, {testing::tail_of(next, 4)}, one_page());
  ASSERT_TRUE(a->flush().is_ok());
  EXPECT_TRUE(soon([&] { return b->longest_child(blocks[0].key, 8, next.tokens, {}, Part::kv).rows == 4; }));
}

TEST_F(StoreShared, WhatOthersNameLongAfterTheyReservedItIsFoundToo) {
  testing::StallingEnv slow;
  const auto blocks = chain(2, 8);
  const auto tail = testing::tail_of(chain(1, 8, 5, blocks[1].key, blocks[1].depth)[0], 3);
  const auto b = open();
  options_.env = &slow;
  const auto a = open();
  put_chain(*a, blocks, one_page());
  ASSERT_TRUE(a->flush().is_ok());
  slow.stall("rename");
  put_chain(*a, {tail}, one_page());
  ASSERT_TRUE(soon([&] { return slow.waiting() == 1; }));
  const auto there = [&] { return b->longest_child(blocks[1].key, 16, tail.tokens, {}, Part::kv).rows == 3; };
  // Long enough for it to look.
  for (int i = 0; i < 75; ++i) {
    EXPECT_FALSE(there());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  slow.let_go();
  ASSERT_TRUE(a->flush().is_ok());
  EXPECT_TRUE(soon(there));
}

}  // namespace
}  // namespace prefixcache
