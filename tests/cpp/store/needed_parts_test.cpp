// What of a chain stays when a RAM tier is too small for all of it.
#include "store/needed_parts.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "prefixcache/block_store.h"
#include "support/store_fixture.h"

namespace prefixcache {
namespace {

using testing::Block;
using testing::block_under;
using testing::chain;
using testing::kPage;
using testing::one_page;
using testing::put_block;
using testing::put_state;
using testing::put_window;
using testing::tail_of;
using testing::test_root;

constexpr std::uint64_t kGroup = 0xfedcba9876543210;
constexpr WindowReach kWindow{8, 0, kGroup};  // two blocks of four tokens

// Every part takes one page, however many rows it has.
Status put_page_of_window(BlockStore& store, const Block& block) {
  return put_window(store, block, block.start(), block.depth, kGroup, one_page());
}

class NeededParts : public testing::StoreFixture {
 protected:
  std::unique_ptr<BlockStore> open_for_pages(std::uint64_t pages) {
    options_.write = WritePolicy::ram_only;
    options_.ram_bytes = pages * kPage;
    auto store = open();
    ask(*store);
    return store;
  }
  // How far rows and window agree.
  std::int64_t ask(BlockStore& store) const {
    const auto keys = keys_of(blocks_);
    const auto rows = static_cast<std::int64_t>(store.longest_prefix(keys, test_root(), 4, Part::kv)) * 4;
    return store.deepest_window({test_root(), keys, 4, tokens_, {}}, kWindow, rows).n;
  }
  // Deepest first.
  std::vector<std::int64_t> states_of(BlockStore& store) const {
    const auto keys = keys_of(blocks_);
    std::vector<std::int64_t> found;
    for (std::int64_t limit = 64;;) {
      const Point point = store.deepest_state({test_root(), keys, 4, tokens_, {}}, limit);
      if (point.n == 0) return found;
      found.push_back(point.n);
      limit = point.n - 1;
    }
  }

  const std::vector<Block> blocks_ = chain(16, 4);
  const std::vector<std::uint32_t> tokens_ = [this] {
    std::vector<std::uint32_t> all;
    for (const auto& block : blocks_) all.insert(all.end(), block.tokens.begin(), block.tokens.end());
    return all;
  }();
};

TEST_F(NeededParts, AWindowStaysWhereItsChainEnds) {
  const auto store = open_for_pages(12);
  std::int64_t reached = 0;
  for (const auto& block : blocks_) {
    if (put_block(*store, block, one_page()).is_ok()) put_page_of_window(*store, block);
    const std::int64_t now = ask(*store);
    EXPECT_GE(now, reached);
    reached = now;
  }
  // Ten blocks and the windows of the last two fill all twelve pages.
  EXPECT_EQ(reached, 40);
  EXPECT_EQ(store->stats().put_full, 6u);
}

TEST_F(NeededParts, AnotherChainIsNotKeptForThisOne) {
  const auto store = open_for_pages(12);
  for (const auto& block : blocks_) {
    if (put_block(*store, block, one_page()).is_ok()) put_page_of_window(*store, block);
  }
  const auto other = chain(6, 4, 7);
  for (const auto& block : other) {
    EXPECT_TRUE(put_block(*store, block, one_page()).is_ok());
    EXPECT_TRUE(put_page_of_window(*store, block).is_ok());
  }
}

TEST_F(NeededParts, SiblingsThatGoOnOtherwiseMakeRoom) {
  const auto store = open_for_pages(4);
  ASSERT_TRUE(put_block(*store, blocks_[0], one_page()).is_ok());
  for (std::uint32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(put_page_of_window(*store, block_under(blocks_[1].parent, 4, {100 + i, 3})).is_ok());
  }
  EXPECT_TRUE(put_block(*store, blocks_[1], one_page()).is_ok());
  EXPECT_TRUE(put_page_of_window(*store, blocks_[1]).is_ok());
  EXPECT_EQ(store->stats().evicted_ram_parts, 2u);
}

TEST_F(NeededParts, ATailStaysUntilItsBlockHasAPlace) {
  const auto store = open_for_pages(4);
  for (std::size_t i = 0; i < 3; ++i) ASSERT_TRUE(put_block(*store, blocks_[i], one_page()).is_ok());
  const Block tail = tail_of(blocks_[3], 2);
  ASSERT_TRUE(put_block(*store, tail, one_page()).is_ok());
  // Two pages, of which the tail's is one.
  const std::vector<testing::SlotSpec> larger = {{"keys", mlx::core::uint8, {0, 2 * kPage / 4}, 0}};
  EXPECT_EQ(put_block(*store, blocks_[3], larger).code(), StatusCode::Full);
  EXPECT_TRUE(has(*store, tail));
  // One page: it takes the tail's.
  EXPECT_TRUE(put_block(*store, blocks_[3], one_page()).is_ok());
  EXPECT_FALSE(has(*store, tail));
  EXPECT_EQ(found(*store, {blocks_.begin(), blocks_.begin() + 4}), 4u);
}

TEST_F(NeededParts, TheDeepestStatesStayUntilThereIsADeeperOne) {
  const auto store = open_for_pages(7);
  for (std::size_t i = 0; i < 4; ++i) ASSERT_TRUE(put_block(*store, blocks_[i], one_page()).is_ok());
  ASSERT_TRUE(put_state(*store, tail_of(blocks_[0], 2)).is_ok());
  ASSERT_TRUE(put_state(*store, tail_of(blocks_[1], 3)).is_ok());
  ASSERT_TRUE(put_state(*store, tail_of(blocks_[2], 1)).is_ok());
  // One before them makes room.
  EXPECT_TRUE(put_block(*store, blocks_[4], one_page()).is_ok());
  EXPECT_EQ(states_of(*store), (std::vector<std::int64_t>{9, 7}));
  EXPECT_EQ(put_block(*store, blocks_[5], one_page()).code(), StatusCode::Full);
  EXPECT_EQ(states_of(*store), (std::vector<std::int64_t>{9, 7}));
  EXPECT_TRUE(put_state(*store, blocks_[4]).is_ok());
  EXPECT_EQ(states_of(*store), (std::vector<std::int64_t>{20, 9}));
  EXPECT_EQ(found(*store, {blocks_.begin(), blocks_.begin() + 5}), 5u);
}

TEST_F(NeededParts, AStateStaysUntilTheRowsOfADeeperOneAreThere) {
  const auto store = open_for_pages(5);
  for (std::size_t i = 0; i < 3; ++i) ASSERT_TRUE(put_block(*store, blocks_[i], one_page()).is_ok());
  ASSERT_TRUE(put_state(*store, tail_of(blocks_[1], 3)).is_ok());
  const Block tail = tail_of(blocks_[3], 2);
  ASSERT_TRUE(put_state(*store, tail).is_ok());
  EXPECT_EQ(put_state(*store, tail_of(blocks_[3], 3)).code(), StatusCode::Full);
  EXPECT_EQ(put_block(*store, blocks_[3], one_page()).code(), StatusCode::Full);
  EXPECT_EQ(store->stats().evicted_ram_parts, 0u);
  EXPECT_EQ(states_of(*store), (std::vector<std::int64_t>{14, 7}));
}

}  // namespace
}  // namespace prefixcache
