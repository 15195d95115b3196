// What depends on the directory: opening, damage, bounds, eviction, faults, two stores on one directory.
#include "prefixcache/block_store.h"

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>
#include <unistd.h>

#include "store/buffer_pool.h"
#include "support/blocks.h"
#include "support/faulty_env.h"
#include "support/temp_dir.h"

namespace prefixcache {
namespace {

namespace fs = std::filesystem;
using testing::Block;
using testing::block_under;
using testing::chain;
using testing::expect_chain;
using testing::expect_rows;
using testing::put_block;
using testing::put_chain;
using testing::request_for;
using testing::test_root;

// A part of 64 KiB and a header: the smallest unit that the RAM tier counts.
std::vector<testing::SlotSpec> one_page() {
  return {{"keys", mlx::core::uint8, {0, 64 * 1024 / 4}, 0}};
}
constexpr std::uint64_t kPage = 64 * 1024;

class BlockStoreTest : public ::testing::Test {
 protected:
  BlockStoreTest() {
    options_.name_space = "test";
    options_.directory = dir_ / "store";
    options_.threads = 2;
    options_.env = &env_;
  }
  std::unique_ptr<BlockStore> open() { return BlockStore::open(options_); }
  // Opens, stores, writes, closes.
  void prepare(const std::vector<Block>& blocks, const std::vector<testing::SlotSpec>& specs = testing::two_slots()) {
    const auto store = open();
    put_chain(*store, blocks, specs);
    ASSERT_TRUE(store->close().is_ok());
  }
  fs::path file_of(const Block& block) const {
    for (const auto& path : dir_.parts()) {
      if (path.filename().string().starts_with(block.key.hex())) return path;
    }
    return {};
  }
  static bool has(BlockStore& store, const Block& block) {
    return store.presence(std::vector<Key>{block.key})[0].has(Part::kv);
  }
  static std::size_t found(BlockStore& store, const std::vector<Block>& blocks) {
    return store.longest_prefix(keys_of(blocks), blocks[0].parent, blocks[0].depth - blocks[0].start(), Part::kv);
  }
  std::string why_refused() {
    try {
      open();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  }

  testing::TempDir dir_;
  testing::FaultyEnv env_;
  Options options_;
};

// ---- opening

TEST_F(BlockStoreTest, BadOptionsAreNamed) {
  const auto refused = [&](const std::string& what, auto change) {
    const Options before = options_;
    change(options_);
    EXPECT_NE(why_refused().find(what), std::string::npos) << what << ": " << why_refused();
    options_ = before;
  };
  for (const std::string bad : {"", ".hidden", "a/b", "..", "a b", "\xc3\xa9"}) {
    refused("name_space is '" + bad + "'", [&](Options& o) { o.name_space = bad; });
  }
  refused("name_space", [](Options& o) { o.name_space = std::string(129, 'a'); });
  refused("directory", [](Options& o) { o.directory.clear(); });
  const std::uint64_t huge = (std::uint64_t{1} << 60) + 1;
  refused("ram_bytes is 1152921504606846977", [&](Options& o) { o.ram_bytes = huge; });
  refused("disk_bytes", [&](Options& o) { o.disk_bytes = huge; });
  refused("queue_bytes", [&](Options& o) { o.queue_bytes = huge; });
  refused("put_wait_seconds is -1", [](Options& o) { o.put_wait_seconds = -1; });
  refused("put_wait_seconds", [](Options& o) { o.put_wait_seconds = std::nan(""); });
  refused("temp_grace_seconds", [](Options& o) { o.temp_grace_seconds = -0.5; });
  refused("threads is -1", [](Options& o) { o.threads = -1; });
  refused("threads is 257", [](Options& o) { o.threads = 257; });
  EXPECT_EQ(why_refused(), "");
}

TEST_F(BlockStoreTest, ADirectoryThatOthersMayWriteToIsRefused) {
  fs::create_directory(options_.directory);
  for (const auto bit : {fs::perms::group_write, fs::perms::others_write}) {
    fs::permissions(options_.directory, fs::perms::owner_all | bit);
    const std::string why = why_refused();
    EXPECT_NE(why.find("directory"), std::string::npos) << why;
    EXPECT_NE(why.find(options_.directory), std::string::npos) << why;
    EXPECT_NE(why.find("group or by others"), std::string::npos) << why;
  }
  fs::permissions(options_.directory, fs::perms::owner_all);
  EXPECT_EQ(why_refused(), "");
}

TEST_F(BlockStoreTest, AnotherUsersDirectoryIsRefused) {
  if (::geteuid() != 0) {
    options_.directory = "/usr";
    env_.private_answer = {StatusCode::IOError, "/usr belongs to user 0", EPERM};
  } else {
    fs::create_directory(options_.directory);
    ASSERT_EQ(::chown(options_.directory.c_str(), 12345, 12345), 0);
  }
  EXPECT_NE(why_refused().find("belongs to user"), std::string::npos);
}

TEST_F(BlockStoreTest, AFileInThePlaceOfTheDirectoryIsRefused) {
  testing::write_file(options_.directory, "x");
  EXPECT_NE(why_refused().find("directory"), std::string::npos);
  options_.directory += "/below";
  EXPECT_NE(why_refused().find("directory"), std::string::npos);
}

TEST_F(BlockStoreTest, ReopeningFindsEverythingWithoutOpeningAFile) {
  const auto blocks = chain(5, 8);
  prepare(blocks);
  options_.directory += "//";
  env_.opens = 0;
  const auto store = open();
  EXPECT_EQ(store->stats().parts, 5u);
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
  EXPECT_EQ(found(*store, blocks), 5u);
  EXPECT_EQ(env_.opens, 0);
  expect_chain(*store, blocks);
  const auto gathered = store->gather(request_for(blocks));
  EXPECT_EQ(gathered.disk_blocks, 5u);
  EXPECT_EQ(gathered.ram_blocks, 0u);
  EXPECT_EQ(env_.opens, 5) << "each file is opened once";
}

TEST_F(BlockStoreTest, AnotherNamespaceSeesNothing) {
  const auto blocks = chain(2, 8);
  prepare(blocks);
  options_.name_space = "other";
  const auto store = open();
  EXPECT_EQ(found(*store, blocks), 0u);
  EXPECT_TRUE(store->children(test_root()).empty());
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
  ASSERT_TRUE(store->clear().is_ok());
  EXPECT_EQ(dir_.parts().size(), 2u);
}

// ---- damage

TEST_F(BlockStoreTest, AnyFlippedBitEndsTheHitAndRemovesTheFile) {
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
      testing::flip_bit(path, round % 2 == 0 ? random() % size : size - 1 - random() % 300, static_cast<int>(random() % 8));
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

TEST_F(BlockStoreTest, RowsThatAreNotAskedForAreCheckedToo) {
  const auto blocks = chain(1, 8);
  prepare(blocks);
  testing::flip_bit(file_of(blocks[0]), fs::file_size(file_of(blocks[0])) - 1);
  const auto store = open();
  EXPECT_EQ(store->gather(request_for(blocks, 0, 1)).status.code(), StatusCode::Corrupt);
}

TEST_F(BlockStoreTest, VerifyFirstChecksOnceAndAlwaysEachTime) {
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

TEST_F(BlockStoreTest, FilesThatShrankGrewOrWereSwappedAreMisses) {
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
  damaged([](const auto& path, const auto& other) { fs::copy_file(other, path, fs::copy_options::overwrite_existing); });
  damaged([](const auto& path, const auto&) { testing::write_file(path, "something else"); });
}

TEST_F(BlockStoreTest, ALinkInTheFilesPlaceIsNotFollowed) {
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

TEST_F(BlockStoreTest, AFileThatIsGoneIsCountedAsLost) {
  const auto blocks = chain(3, 8);
  prepare(blocks);
  const auto store = open();
  fs::remove(file_of(blocks[2]));
  const auto gathered = store->gather(request_for(blocks));
  EXPECT_EQ(gathered.status.code(), StatusCode::NotFound);
  EXPECT_EQ(gathered.good, 2u);
  EXPECT_EQ(store->stats().lost_parts, 1u);
  EXPECT_EQ(store->stats().corrupt_parts, 0u);
  // A file that was read before stays readable: its mapping outlives the name.
  fs::remove(file_of(blocks[1]));
  expect_chain(*store, {blocks[0], blocks[1]});
}

TEST_F(BlockStoreTest, AFileCutWhileItIsReadIsAMissAndNoCrash) {
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

TEST_F(BlockStoreTest, AReadErrorIsAMissThatKeepsTheFile) {
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

// ---- the RAM tier

TEST_F(BlockStoreTest, TheRamBoundHoldsUnderChurn) {
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

TEST_F(BlockStoreTest, AnEntryAboveTheRamBoundEvictsNothing) {
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

TEST_F(BlockStoreTest, WhatLeavesTheRamIsReadFromTheDisk) {
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

TEST_F(BlockStoreTest, AHitKeepsItsWholeChain) {
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

TEST_F(BlockStoreTest, AChainLongerThanTheRamKeepsItsBeginning) {
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

TEST_F(BlockStoreTest, ExtendingTheOldestChainKeepsIt) {
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
class Survivors : public BlockStoreTest {
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
};

TEST_F(Survivors, OfTheRamTierArePrefixes) {
  options_.write = WritePolicy::ram_only;
  options_.ram_bytes = 9 * kPage;
  for (std::uint32_t seed = 0; seed < 4; ++seed) run(seed);
}

TEST_F(Survivors, OfTheDiskArePrefixes) {
  options_.disk_bytes = 9 * (kPage + 1024);
  for (std::uint32_t seed = 0; seed < 3; ++seed) {
    options_.directory = dir_ / ("store");
    fs::remove_all(options_.directory);
    run(seed);
  }
}

// ---- the queue

TEST_F(BlockStoreTest, AFullQueueDropsTheNewestSuffix) {
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

TEST_F(BlockStoreTest, PutWaitsForRoomInTheQueue) {
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

TEST_F(BlockStoreTest, CloseWritesWhatWaits) {
  const auto blocks = chain(6, 8);
  {
    const auto store = open();
    put_chain(*store, blocks);
  }
  EXPECT_EQ(dir_.parts().size(), 6u);
  expect_chain(*open(), blocks);
}

// ---- faults of the disk

TEST_F(BlockStoreTest, AFailedWriteDegradesAndTheNextGoodOneRecovers) {
  options_.ram_bytes = 1 << 20;
  const auto store = open();
  for (const int number : {ENOSPC, EIO, EROFS}) {
    const auto bad = chain(2, 8, static_cast<std::uint32_t>(number)), good = chain(1, 8, static_cast<std::uint32_t>(1000 + number));
    env_.write_error = number;
    put_chain(*store, bad);
    const Status status = store->flush();
    EXPECT_EQ(status.code(), StatusCode::IOError);
    EXPECT_EQ(status.error_number(), number);
    auto stats = store->stats();
    EXPECT_TRUE(stats.degraded);
    EXPECT_NE(stats.last_error.find(std::strerror(number)), std::string::npos) << stats.last_error;
    EXPECT_EQ(stats.disk_bytes, dir_.bytes());
    expect_chain(*store, bad);  // from RAM
    const auto presence = store->presence(keys_of(bad));
    EXPECT_TRUE(presence[0].parts[0].in_ram);
    EXPECT_FALSE(presence[0].parts[0].on_disk);

    env_.write_error = 0;
    put_chain(*store, good);
    EXPECT_TRUE(store->flush().is_ok());
    EXPECT_FALSE(store->stats().degraded);
    EXPECT_TRUE(store->presence(keys_of(good))[0].parts[0].on_disk);
  }
  EXPECT_EQ(store->stats().write_errors, 6u);
}

TEST_F(BlockStoreTest, WithoutARamTierAFailedWriteIsAMiss) {
  const auto store = open();
  const auto blocks = chain(2, 8);
  env_.rename_error = EIO;
  put_chain(*store, blocks);
  EXPECT_EQ(store->flush().error_number(), EIO);
  EXPECT_EQ(found(*store, blocks), 0u);
  EXPECT_EQ(store->stats().parts, 0u);
  EXPECT_TRUE(dir_.files().empty());
}

TEST_F(BlockStoreTest, ADirectoryRemovedWhileRunningComesBack) {
  options_.ram_bytes = 1 << 20;
  const auto store = open();
  const auto blocks = chain(3, 8);
  put_chain(*store, {blocks[0], blocks[1]});
  ASSERT_TRUE(store->flush().is_ok());
  fs::remove_all(options_.directory);
  expect_chain(*store, {blocks[0], blocks[1]});
  ASSERT_TRUE(put_block(*store, blocks[2]).is_ok());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(dir_.parts().size(), 1u);
}

TEST_F(BlockStoreTest, ADirectoryThatCannotBeMadeGivesADegradedStore) {
  options_.ram_bytes = 1 << 20;
  env_.private_answer = {StatusCode::IOError, "the volume is gone", EIO};
  const auto store = open();
  EXPECT_TRUE(store->stats().degraded);
  EXPECT_EQ(store->stats().last_error, "the volume is gone");
  const auto blocks = chain(2, 8);
  put_chain(*store, blocks);
  expect_chain(*store, blocks);
}

// ---- the disk's bound

TEST_F(BlockStoreTest, TheDiskBoundHolds) {
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

TEST_F(BlockStoreTest, AChainLongerThanTheDiskKeepsItsBeginning) {
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

TEST_F(BlockStoreTest, FilesOfOtherNamespacesGoFirst) {
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

TEST_F(BlockStoreTest, AFileAboveTheDiskBoundEvictsNothing) {
  const auto foreign = chain(1, 4, 1), own = chain(1, 4, 2), large = chain(1, 4, 3);
  options_.name_space = "other";
  prepare(foreign);
  options_.name_space = "test";
  options_.disk_bytes = kPage;
  const auto store = open();
  put_chain(*store, own);
  ASSERT_TRUE(store->flush().is_ok());
  put_block(*store, large[0], one_page());
  EXPECT_EQ(store->flush().code(), StatusCode::Full);
  EXPECT_FALSE(has(*store, large[0]));
  EXPECT_EQ(dir_.parts().size(), 2u);
  expect_chain(*store, own);
}

TEST_F(BlockStoreTest, RecencyOfChainsSurvivesARestart) {
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

TEST_F(BlockStoreTest, OldTemporaryFilesAreRemovedAtOpen) {
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

// ---- two stores on one directory

TEST_F(BlockStoreTest, WhatOneStoreWritesTheOtherFindsWithoutReopening) {
  const auto first = open();
  const auto second = open();
  const auto blocks = chain(5, 8);
  put_chain(*first, {blocks[0], blocks[1], blocks[2]});
  ASSERT_TRUE(first->flush().is_ok());
  EXPECT_EQ(found(*second, blocks), 3u);
  expect_chain(*second, {blocks[0], blocks[1], blocks[2]});
  put_chain(*second, blocks);
  ASSERT_TRUE(second->flush().is_ok());
  EXPECT_EQ(second->stats().written_parts, 2u) << "what the other one wrote is not written again";
  EXPECT_EQ(found(*first, blocks), 5u);
  expect_chain(*first, blocks);
  EXPECT_EQ(second->stats().disk_bytes, dir_.bytes());

  // And what one removes is a miss for the other.
  const std::vector<Part> kv = {Part::kv};
  ASSERT_TRUE(first->erase(std::vector<Key>{blocks[4].key}, kv).is_ok());
  const auto third = open();
  EXPECT_EQ(found(*third, blocks), 4u);
}

TEST_F(BlockStoreTest, AFileOfTheOtherNamespaceIsNotServedUnderThisOne) {
  const auto blocks = chain(1, 8);
  prepare(blocks);
  const fs::path path = file_of(blocks[0]);
  options_.name_space = "other";
  const auto store = open();
  // Even moved there, it is served only because its name and content agree with the key.
  const fs::path moved = fs::path(options_.directory) / "v1/other" / path.parent_path().filename();
  fs::create_directories(moved);
  fs::copy_file(path, moved / ("f" + path.filename().string().substr(1)));
  EXPECT_EQ(found(*store, blocks), 0u);
}

}  // namespace
}  // namespace prefixcache
