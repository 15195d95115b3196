// Two things at once, in the one order that hurts.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/store_fixture.h"

namespace prefixcache {
namespace {

using testing::Block;
using testing::chain;

constexpr std::uint64_t kGroup = 5;

class StoreRaces : public testing::StoreFixture {
 protected:
  // Lets `meanwhile` happen once, after the next file was opened and before anybody is told.
  void while_a_file_is_opened(std::function<void()> meanwhile) {
    pending_ = true;
    env_.after_map = [this, meanwhile = std::move(meanwhile)](const std::string&) {
      if (std::exchange(pending_, false)) meanwhile();
    };
  }

  Gathered window(BlockStore& store, std::int64_t lo, std::int64_t hi) {
    auto request = testing::request_for({block_}, lo, hi);
    request.part = Part::win;
    request.group = kGroup;
    return store.gather(request);
  }

  Block block_ = chain(1, 8)[0];
  bool pending_ = false;
};

TEST_F(StoreRaces, AFullerWindowWhileTheNarrowerOneIsOpened) {
  {
    const auto before = open();
    ASSERT_TRUE(put_window(*before, block_, 5, 8, kGroup).is_ok());
  }
  for (const bool written : {true, false}) {
    const auto store = open();
    if (!written) env_.hold_writes();
    while_a_file_is_opened([&] {
      ASSERT_TRUE(put_window(*store, block_, written ? 2 : 0, 8, kGroup).is_ok());
      if (written) {
        ASSERT_TRUE(store->flush().is_ok());
      }
    });
    testing::expect_rows(window(*store, 5, 8), {block_}, 5, 8);
    testing::expect_rows(window(*store, written ? 2 : 0, 8), {block_}, written ? 2 : 0, 8);
    env_.release_writes();
    ASSERT_TRUE(store->flush().is_ok());
    testing::expect_rows(window(*store, written ? 2 : 0, 8), {block_}, written ? 2 : 0, 8);
    const Key key = group_key(block_.key, kGroup);
    EXPECT_EQ(store->presence(std::vector<Key>{key})[0].parts[1].row_lo, written ? 2 : 0);
  }
}

TEST_F(StoreRaces, AFullerWindowThatFindsNoRoomWhileTheOneBeforeIsWritten) {
  const auto specs = testing::one_page();  // a quarter of it a row
  options_.disk_bytes = 9 * testing::kPage / 4 + 4096;
  const auto store = open();
  ASSERT_TRUE(put_window(*store, block_, 5, 8, kGroup, specs).is_ok());
  ASSERT_TRUE(store->flush().is_ok());
  env_.hold_writes();
  ASSERT_TRUE(put_window(*store, block_, 3, 8, kGroup, specs).is_ok());
  env_.wait_for_write();
  ASSERT_TRUE(put_window(*store, block_, 0, 8, kGroup, specs).is_ok());
  env_.release_writes();
  EXPECT_TRUE(store->flush().is_ok());
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
  auto request = testing::request_for({block_}, 3, 8);
  request.part = Part::win;
  request.group = kGroup;
  testing::expect_rows(store->gather(request), {block_}, 3, 8, -1, specs);
  EXPECT_EQ(store->stats().lost_parts, 0u);
}

TEST_F(StoreRaces, ErasedAndPutAgainWhileItIsOpened) {
  prepare({block_});
  const auto store = open();
  while_a_file_is_opened([&] {
    store->erase(std::vector<Key>{block_.key}, std::vector<Part>{Part::kv});
    ASSERT_TRUE(put_block(*store, block_).is_ok());
    ASSERT_TRUE(store->flush().is_ok());
  });
  testing::expect_chain(*store, {block_});
  testing::expect_chain(*store, {block_});
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
  EXPECT_EQ(store->stats().corrupt_parts + store->stats().lost_parts, 0u);
}

TEST_F(StoreRaces, ErasedWhileItIsOpened) {
  prepare({block_});
  for (const bool all : {false, true}) {
    const auto store = open();
    while_a_file_is_opened([&] {
      if (all) {
        store->clear();
      } else {
        store->erase(std::vector<Key>{block_.key}, std::vector<Part>{Part::kv});
      }
    });
    // It was there when it was asked for.
    testing::expect_chain(*store, {block_});
    EXPECT_EQ(store->gather(testing::request_for({block_})).status.code(), StatusCode::NotFound);
    EXPECT_EQ(store->stats().parts, 0u);
    EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
    testing::put_chain(*store, {block_});
  }
}

TEST_F(StoreRaces, PutAgainAfterADamagedFileWasOpened) {
  prepare({block_});
  testing::flip_bit(file_of(block_), std::filesystem::file_size(file_of(block_)) - 1);
  const auto store = open();
  while_a_file_is_opened([&] {
    store->erase(std::vector<Key>{block_.key}, std::vector<Part>{Part::kv});
    ASSERT_TRUE(put_block(*store, block_).is_ok());
    ASSERT_TRUE(store->flush().is_ok());
  });
  // The old file fails its check. The new one has nothing to do with it.
  EXPECT_EQ(store->gather(testing::request_for({block_})).status.code(), StatusCode::Corrupt);
  EXPECT_EQ(found(*store, {block_}), 1u);
  testing::expect_chain(*store, {block_});
  EXPECT_EQ(dir_.parts().size(), 1u);
}

TEST_F(StoreRaces, ClosedWhileAFileIsOpened) {
  prepare({block_});
  const auto store = open();
  while_a_file_is_opened([&] { store->close(); });
  const Gathered gathered = store->gather(testing::request_for({block_}));
  if (gathered.status.is_ok()) testing::expect_rows(gathered, {block_}, 0, 8);
  EXPECT_EQ(store->gather(testing::request_for({block_})).status.code(), StatusCode::Closed);
  EXPECT_EQ(put_block(*store, block_).code(), StatusCode::Closed);
  EXPECT_EQ(dir_.parts().size(), 1u);
}

}  // namespace
}  // namespace prefixcache
