// Opening a store, what it survives, and two stores on one directory.
#include "prefixcache/block_store.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "support/failing_env.h"
#include "support/no_threads.h"
#include "support/store_fixture.h"

namespace prefixcache {
namespace {

namespace fs = std::filesystem;
using testing::chain;
using testing::expect_chain;
using testing::put_block;
using testing::put_chain;
using testing::request_for;
using testing::test_root;

using BlockStoreTest = testing::StoreFixture;

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
  refused("directory is a text with a zero byte", [](Options& o) { o.directory += std::string("\0/x", 3); });
  const std::uint64_t huge = (std::uint64_t{1} << 60) + 1;
  refused("ram_bytes is 1152921504606846977", [&](Options& o) { o.ram_bytes = huge; });
  refused("disk_bytes", [&](Options& o) { o.disk_bytes = huge; });
  refused("queue_bytes", [&](Options& o) { o.queue_bytes = huge; });
  refused("put_wait_seconds is -1", [](Options& o) { o.put_wait_seconds = -1; });
  refused("put_wait_seconds", [](Options& o) { o.put_wait_seconds = std::nan(""); });
  refused("disk_wait_seconds", [](Options& o) { o.disk_wait_seconds = 1e12; });
  refused("disk_wait_seconds is -0.1", [](Options& o) { o.disk_wait_seconds = -0.1; });
  refused("disk_wait_seconds is inf", [](Options& o) { o.disk_wait_seconds = INFINITY; });
  refused("flush_wait_seconds is 10000000000", [](Options& o) { o.flush_wait_seconds = 1e10; });
  refused("flush_wait_seconds", [](Options& o) { o.flush_wait_seconds = std::nan(""); });
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

TEST_F(BlockStoreTest, BlocksOnTheDiskAlonePartlyInMemoryAndInRamGiveTheSameRows) {
  // More files than are opened at once, of tensors that do not lie in the order of their slots.
  const std::vector<testing::SlotSpec> specs = {{"a", mlx::core::uint8, {2, 0, 1024}, 1},
                                                {"b", mlx::core::float32, {0, 16 * 1024}, 0},
                                                {"c", mlx::core::float16, {0, 16 * 1024}, 0}};
  const auto blocks = chain(40, 4);
  prepare(blocks, specs);
  const std::vector<testing::Block> first(blocks.begin(), blocks.begin() + 5);
  const auto drop = [&](std::size_t from, std::size_t every) {
    for (std::size_t i = from; i < blocks.size(); i += every) {
      if (!testing::drop_from_memory(file_of(blocks[i]))) return false;
    }
    return true;
  };
  if (!drop(0, 1)) GTEST_SKIP() << "this system drops no file from memory";
  // All, every third, one.
  for (const auto& [from, every] : {std::pair{0, 1}, {0, 3}, {17, 100}}) {
    options_.ram_bytes = 0;
    drop(from, every);
    expect_chain(*open(), blocks, specs);
    options_.ram_bytes = 8 << 20;
    const auto with_ram = open();
    put_chain(*with_ram, first, specs);
    drop(from, every);
    expect_chain(*with_ram, blocks, specs);
  }
}

TEST_F(BlockStoreTest, FewDescriptorsAreEnoughForManyFiles) {
  const auto blocks = chain(70, 4);
  prepare(blocks);
  env_.most_descriptors = 3;
  expect_chain(*open(), blocks);
}

// Each time while a fetch has opened the file, and read nothing of it.
TEST_F(BlockStoreTest, FilesThatChangeWhileTheyAreOpenedGiveRightRowsOrNone) {
  const auto blocks = chain(3, 4);
  const auto& middle = blocks[1];
  BlockStore* current = nullptr;
  const std::vector<std::pair<const char*, std::function<void(const std::string&)>>> changes = {
      {"erased", [&](const std::string&) { current->erase(std::vector{middle.key}, std::vector{Part::kv}); }},
      {"put again",
       [&](const std::string&) {
         current->erase(std::vector{middle.key}, std::vector{Part::kv});
         put_block(*current, middle);
       }},
      {"unlinked", [](const std::string& path) { fs::remove(path); }},
      {"truncated", [](const std::string& path) { fs::resize_file(path, fs::file_size(path) - 1); }},
      {"emptied", [](const std::string& path) { fs::resize_file(path, 0); }},
      {"damaged", [](const std::string& path) { testing::flip_bit(path, fs::file_size(path) - 1); }},
      {"replaced",
       [&](const std::string& path) {
         fs::remove(path);
         fs::copy_file(file_of(blocks[2]), path);
       }},
  };
  for (const auto& [what, change] : changes) {
    SCOPED_TRACE(what);
    fs::remove_all(options_.directory);
    prepare(blocks);
    const auto store = open();
    current = store.get();
    bool done = false;
    env_.on_will_read = [&, name = file_of(middle).string(), act = change](const std::string& path) {
      if (path == name && !std::exchange(done, true)) act(path);
    };
    const auto right_or_none = [&](BlockStore& some) {
      const auto gathered = some.gather(request_for(blocks));
      if (gathered.status.is_ok()) {
        testing::expect_rows(gathered, blocks, 0, blocks.back().depth, -1);
      } else {
        EXPECT_LE(gathered.good, 1u);
      }
      // What is put anew is right.
      put_chain(some, blocks);
      ASSERT_TRUE(some.flush().is_ok());
      expect_chain(some, blocks);
      ASSERT_TRUE(some.close().is_ok());
    };
    right_or_none(*store);
    EXPECT_TRUE(done);
    env_.on_will_read = nullptr;
    right_or_none(*open());
    expect_chain(*open(), blocks);
  }
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

TEST_F(BlockStoreTest, AFailedWriteDegradesAndTheNextGoodOneRecovers) {
  options_.ram_bytes = 1 << 20;
  const auto store = open();
  for (const int number : {ENOSPC, EIO, EROFS}) {
    const auto salt = static_cast<std::uint32_t>(number);
    const auto bad = chain(2, 8, salt), good = chain(1, 8, 1000 + salt);
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
  EXPECT_GE(store->stats().write_errors, 6u);
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

TEST_F(BlockStoreTest, WithoutAThreadThatWritesItWorksInRam) {
  if (!testing::kCanRefuseThreads) GTEST_SKIP() << "this C library has no default size of stacks";
  options_.ram_bytes = 1 << 20;
  const testing::NoThreads none;
  const auto store = open();
  EXPECT_TRUE(store->stats().degraded);
  EXPECT_NE(store->stats().last_error.find("no thread"), std::string::npos) << store->stats().last_error;
  const auto blocks = chain(2, 4);
  put_chain(*store, blocks);
  EXPECT_EQ(found(*store, blocks), 2u);
  expect_chain(*store, blocks);
  EXPECT_TRUE(store->flush().is_ok());
  EXPECT_TRUE(store->close().is_ok());
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

TEST_F(BlockStoreTest, ALookupAsksTheDiskForTheFirstMissingBlockOnly) {
  testing::FailingEnv counting;
  options_.env = &counting;
  const auto store = open();
  const auto asked = [&](std::size_t known, std::size_t wanted) {
    const auto blocks = chain(wanted, 4, static_cast<std::uint32_t>(wanted));
    put_chain(*store, {blocks.begin(), blocks.begin() + static_cast<long>(known)});
    EXPECT_TRUE(store->flush().is_ok());
    const std::size_t before = counting.calls().size();
    EXPECT_EQ(found(*store, blocks), known);
    const auto calls = counting.calls();
    for (std::size_t i = before; i < calls.size(); ++i) EXPECT_EQ(calls[i], testing::Call::stat);
    return calls.size() - before;
  };
  // The folders on the way, and the file in the last of them.
  for (const std::size_t wanted : {4u, 400u}) {
    const std::size_t calls = asked(3, wanted);
    EXPECT_TRUE(calls == 3 || calls == 4) << calls;
  }
  EXPECT_EQ(asked(5, 5), 0u);
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
