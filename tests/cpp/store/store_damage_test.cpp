// Files that were damaged, cut, swapped or lost.
#include "prefixcache/block_store.h"

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/store_fixture.h"

namespace prefixcache {
namespace {

namespace fs = std::filesystem;
using testing::chain;
using testing::expect_chain;
using testing::put_chain;
using testing::request_for;

using StoreDamage = testing::StoreFixture;

TEST_F(StoreDamage, AnyFlippedBitEndsTheHitAndRemovesTheFile) {
  const auto blocks = chain(3, 8);
  std::mt19937 random(8);
  for (int round = 0; round < 25; ++round) {
    for (const auto verify : {Verify::first, Verify::always}) {
      options_.verify = verify;
      prepare(blocks);
      const auto bad = random() % 3;
      const fs::path path = file_of(blocks[bad]);
      const std::uint64_t size = fs::file_size(path);
      // Header and data alike.
      const std::uint64_t at = round % 2 == 0 ? random() % size : size - 1 - random() % 300;
      testing::flip_bit(path, at, static_cast<int>(random() % 8));
      const auto store = open();
      const auto gathered = store->gather(request_for(blocks));
      EXPECT_EQ(gathered.status.code(), StatusCode::Corrupt) << gathered.status.message();
      EXPECT_EQ(gathered.good, bad);
      EXPECT_TRUE(gathered.slots.empty());
      EXPECT_FALSE(fs::exists(path));
      EXPECT_EQ(store->stats().corrupt_parts, 1u);
      EXPECT_FALSE(store->stats().last_error.empty());
      EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
      EXPECT_EQ(found(*store, blocks), bad);
      if (bad > 0) expect_chain(*store, {blocks.begin(), blocks.begin() + static_cast<long>(bad)});
      // What was lost can be stored again.
      put_chain(*store, blocks);
      expect_chain(*store, blocks);
      ASSERT_TRUE(store->clear().is_ok());
    }
  }
}

TEST_F(StoreDamage, RowsThatAreNotAskedForAreCheckedToo) {
  const auto blocks = chain(1, 8);
  prepare(blocks);
  testing::flip_bit(file_of(blocks[0]), fs::file_size(file_of(blocks[0])) - 1);
  const auto store = open();
  EXPECT_EQ(store->gather(request_for(blocks, 0, 1)).status.code(), StatusCode::Corrupt);
}

TEST_F(StoreDamage, VerifyFirstChecksOnceAndAlwaysEachTime) {
  const auto blocks = chain(1, 8);
  for (const auto verify : {Verify::first, Verify::always, Verify::never}) {
    options_.verify = verify;
    prepare(blocks);
    const auto store = open();
    expect_chain(*store, blocks);
    // The mapping shows what another process does to the file.
    testing::flip_bit(file_of(blocks[0]), fs::file_size(file_of(blocks[0])) - 1);
    const auto code = store->gather(request_for(blocks)).status.code();
    EXPECT_EQ(code, verify == Verify::always ? StatusCode::Corrupt : StatusCode::Ok);
    ASSERT_TRUE(store->clear().is_ok());
  }
}

TEST_F(StoreDamage, FilesThatShrankGrewOrWereSwappedAreMisses) {
  const auto blocks = chain(3, 8);
  const auto damaged = [&](auto damage) {
    prepare(blocks);
    damage(file_of(blocks[1]), file_of(blocks[2]));
    const auto store = open();
    const auto gathered = store->gather(request_for(blocks));
    EXPECT_FALSE(gathered.status.is_ok());
    EXPECT_EQ(gathered.good, 1u);
    EXPECT_EQ(store->stats().corrupt_parts + store->stats().lost_parts, 1u);
    EXPECT_EQ(found(*store, blocks), 1u);
    ASSERT_TRUE(store->clear().is_ok());
  };
  damaged([](const auto& path, const auto&) { fs::resize_file(path, 0); });
  damaged([](const auto& path, const auto&) { fs::resize_file(path, fs::file_size(path) / 2); });
  damaged([](const auto& path, const auto&) { fs::resize_file(path, fs::file_size(path) + 1); });
  constexpr auto kOver = fs::copy_options::overwrite_existing;
  damaged([](const auto& path, const auto& other) { fs::copy_file(other, path, kOver); });
  damaged([](const auto& path, const auto&) { testing::write_file(path, "something else"); });
}

TEST_F(StoreDamage, ALinkInTheFilesPlaceIsNotFollowed) {
  const auto blocks = chain(2, 8);
  prepare(blocks);
  const auto store = open();
  const fs::path path = file_of(blocks[1]);
  fs::rename(path, dir_ / "elsewhere");
  fs::create_symlink(dir_ / "elsewhere", path);
  EXPECT_EQ(store->gather(request_for(blocks)).good, 1u);
  EXPECT_EQ(found(*store, blocks), 1u);
  EXPECT_TRUE(fs::exists(dir_ / "elsewhere"));
  EXPECT_EQ(found(*open(), blocks), 1u);
}

TEST_F(StoreDamage, AFileThatIsGoneIsCountedAsLost) {
  const auto blocks = chain(3, 8);
  prepare(blocks);
  const auto store = open();
  fs::remove(file_of(blocks[2]));
  const auto gathered = store->gather(request_for(blocks));
  EXPECT_EQ(gathered.status.code(), StatusCode::NotFound);
  EXPECT_EQ(gathered.good, 2u);
  EXPECT_EQ(store->stats().lost_parts, 1u);
  EXPECT_EQ(store->stats().corrupt_parts, 0u);
  // Also one that was read before and is mapped: somebody wanted it gone.
  expect_chain(*store, {blocks[0], blocks[1]});
  fs::remove(file_of(blocks[1]));
  EXPECT_EQ(store->gather(request_for({blocks[0], blocks[1]})).good, 1u);
  EXPECT_EQ(store->stats().lost_parts, 2u);
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
  expect_chain(*store, {blocks[0]});
}

TEST_F(StoreDamage, AFileCutWhileItIsReadIsAMissAndNoCrash) {
  // Several pages, so that the copy runs into the part that is gone.
  const std::vector<testing::SlotSpec> specs = {{"keys", mlx::core::uint8, {0, 1 << 15}, 0}};
  const auto blocks = chain(3, 8);
  for (const auto verify : {Verify::first, Verify::never}) {
    options_.verify = verify;
    prepare(blocks, specs);
    const auto store = open();
    std::atomic<int> cut{0};
    env_.after_map = [&](const std::string& path) {
      if (path.find(blocks[1].key.hex()) == std::string::npos) return;
      fs::resize_file(path, 40000);
      ++cut;
    };
    const auto gathered = store->gather(request_for(blocks));
    env_.after_map = nullptr;
    EXPECT_EQ(cut, 1);
    EXPECT_FALSE(gathered.status.is_ok());
    EXPECT_EQ(gathered.good, 1u);
    EXPECT_EQ(store->stats().corrupt_parts, 1u);
    EXPECT_FALSE(has(*store, blocks[1]));
    EXPECT_EQ(dir_.parts().size(), 2u);
    expect_chain(*store, {blocks[0]}, specs);
    ASSERT_TRUE(store->clear().is_ok());
  }
}

TEST_F(StoreDamage, WhatTheProcessLacksIsNoFaultOfTheFile) {
  const auto blocks = chain(2, 8);
  // A tail: once forgotten, nobody would ask the disk for it.
  const auto tail = testing::tail_of(chain(1, 8, 5, blocks[1].key, blocks[1].depth)[0], 3);
  prepare(blocks);
  prepare({tail});
  const auto store = open();
  for (const int number : {EMFILE, ENFILE, ENOMEM}) {
    env_.open_error = number;
    EXPECT_EQ(store->gather(request_for({blocks[0], blocks[1], tail})).status.error_number(), number);
    env_.open_error = 0;
    EXPECT_EQ(store->stats().corrupt_parts, 0u);
    EXPECT_TRUE(has(*store, tail));
  }
  expect_chain(*store, {blocks[0], blocks[1], tail});
}

TEST_F(StoreDamage, AReadErrorIsAMissThatKeepsTheFile) {
  const auto blocks = chain(2, 8);
  prepare(blocks);
  const auto store = open();
  env_.read_error = EIO;
  auto gathered = store->gather(request_for(blocks));
  EXPECT_EQ(gathered.status.code(), StatusCode::IOError);
  EXPECT_EQ(gathered.status.error_number(), EIO);
  EXPECT_EQ(gathered.good, 0u);
  EXPECT_EQ(dir_.parts().size(), 2u);
  env_.read_error = 0;
  EXPECT_EQ(found(*store, blocks), 2u) << "it is found again when the disk is back";
  expect_chain(*store, blocks);
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
}

}  // namespace
}  // namespace prefixcache
