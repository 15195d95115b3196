#include "store/usage.h"

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "support/temp_dir.h"

namespace prefixcache::store {
namespace {

using testing::TempDir;

constexpr std::uint64_t kLimit = 1000;

class UsageTest : public ::testing::Test {
 protected:
  Usage open() { return {Env::posix(), dir_ / ".usage"}; }
  static bool reserve(Usage& usage, std::uint64_t bytes) {
    bool granted = false;
    const Status status = usage.reserve(bytes, kLimit, granted);
    EXPECT_TRUE(status.is_ok()) << status.message();
    return granted;
  }
  // Whether the sum is right afterwards for sure.
  bool remove(Usage& usage, const std::string& name, std::uint64_t bytes) {
    bool told = false;
    usage.remove(dir_ / name, bytes, told);
    return told;
  }
  static void count(Usage& usage, std::uint64_t bytes) {
    ASSERT_TRUE(usage.begin_count().is_ok());
    ASSERT_TRUE(usage.end_count(bytes).is_ok());
  }

  TempDir dir_;
};

TEST_F(UsageTest, NothingIsGrantedBeforeSomebodyCounted) {
  auto usage = open();
  bool granted = true;
  EXPECT_EQ(usage.reserve(1, kLimit, granted).code(), StatusCode::NotFound);
  EXPECT_FALSE(granted);
  count(usage, 10);
  EXPECT_TRUE(reserve(usage, 1));
  EXPECT_EQ(usage.used(), 11u);
}

TEST_F(UsageTest, AllShareOneLimit) {
  auto a = open(), b = open();
  count(a, 100);
  EXPECT_TRUE(reserve(a, 400));
  EXPECT_TRUE(reserve(b, 400));
  EXPECT_EQ(b.used(), 900u);
  EXPECT_FALSE(reserve(a, 100)) << "the file itself has 64 bytes";
  EXPECT_EQ(a.used(), 900u);
  b.release(400);
  EXPECT_TRUE(reserve(a, 400));
  EXPECT_FALSE(reserve(b, 1001));
}

TEST_F(UsageTest, DamageIsAReasonToCountAgain) {
  auto usage = open();
  count(usage, 100);
  for (int byte = 0; byte < 40; ++byte) {
    testing::flip_bit(dir_ / ".usage", static_cast<std::uint64_t>(byte), byte % 8);
    bool granted = true;
    EXPECT_EQ(usage.reserve(1, kLimit, granted).code(), StatusCode::NotFound) << byte;
    EXPECT_FALSE(granted);
    usage.release(7);
    EXPECT_FALSE(remove(usage, "missing", 7));
    count(usage, 100);
    EXPECT_EQ(usage.used(), 100u);
  }
}

TEST_F(UsageTest, AFileCutAnywhereIsAReasonToCountAgain) {
  auto usage = open();
  for (std::uintmax_t size = 0; size < 64; ++size) {
    count(usage, 100);
    std::filesystem::resize_file(dir_ / ".usage", size);
    bool granted = true;
    const Status status = usage.reserve(1, kLimit, granted);
    // The last bytes are of no use yet.
    EXPECT_EQ(status.is_ok(), size >= 40) << size << ": " << status.message();
    EXPECT_EQ(granted, size >= 40) << size;
  }
  // Somebody's file, much longer than ours.
  testing::write_file(dir_ / ".usage", std::string(1 << 20, 'x'));
  count(usage, 70);
  EXPECT_TRUE(reserve(usage, 30));
  EXPECT_EQ(open().used(), 0u);
  EXPECT_EQ(usage.used(), 100u);
}

TEST_F(UsageTest, WhatIsReservedDuringACountIsAddedToIt) {
  auto a = open(), b = open();
  count(a, 0);
  ASSERT_TRUE(reserve(a, 100));
  ASSERT_TRUE(b.begin_count().is_ok());
  ASSERT_TRUE(reserve(a, 30));
  ASSERT_TRUE(b.end_count(100).is_ok());
  EXPECT_EQ(b.used(), 130u);
}

TEST_F(UsageTest, AMissingFileIsSubtractedOnceAtMost) {
  auto a = open(), b = open();
  count(b, 0);
  count(a, 0);
  ASSERT_TRUE(reserve(a, 500));
  for (const char* name : {"1", "2"}) testing::write_file(dir_ / name, std::string(100, 'x'));
  // Removed by hand: nobody has said so.
  EXPECT_TRUE(remove(a, "missing", 100));
  EXPECT_EQ(a.used(), 400u);
  // Its own removals are no reason for doubt.
  EXPECT_TRUE(remove(a, "1", 100));
  EXPECT_TRUE(remove(a, "missing", 100));
  EXPECT_EQ(a.used(), 200u);
  // Another store's may have been this very file.
  EXPECT_TRUE(remove(b, "2", 100));
  EXPECT_TRUE(dir_.files("").empty());
  EXPECT_FALSE(remove(a, "missing", 100));
  count(a, 100);
  EXPECT_TRUE(remove(a, "missing", 100));
  EXPECT_EQ(a.used(), 0u);
}

TEST_F(UsageTest, WhatACountLeftOutIsNotSubtractedAgain) {
  auto a = open(), b = open();
  count(a, 500);
  // Somebody removes a file of 100 bytes, and the other store counts what is left.
  count(b, 400);
  EXPECT_FALSE(remove(a, "missing", 100)) << "only a count can tell";
  EXPECT_TRUE(reserve(a, 0));
  EXPECT_EQ(a.used(), 400u);
  count(a, 400);
  EXPECT_TRUE(remove(a, "missing", 100)) << "its own count is no reason for doubt";
}

TEST_F(UsageTest, AFileGivesBackNoMoreThanItHas) {
  auto a = open(), b = open();
  count(a, 0);
  ASSERT_TRUE(reserve(a, 100));
  testing::write_file(dir_ / "cut", std::string(30, 'x'));
  count(b, 30);
  EXPECT_TRUE(remove(a, "cut", 100));
  EXPECT_EQ(a.used(), 0u);
  ASSERT_TRUE(reserve(a, 50));
  testing::write_file(dir_ / "cut", std::string(30, 'x'));
  EXPECT_TRUE(remove(a, "cut", 100));
  EXPECT_EQ(a.used(), 20u);
}

TEST_F(UsageTest, AFileThatTakesAnothersPlaceGivesItsBytesBackOnce) {
  auto a = open(), b = open();
  count(b, 0);
  count(a, 0);
  const auto written = [&](const std::string& name, std::size_t bytes) {
    ASSERT_TRUE(reserve(a, bytes));
    testing::write_file(dir_ / name, std::string(bytes, 'x'));
  };
  written("new", 100);
  ASSERT_TRUE(a.rename(dir_ / "new", dir_ / "part", 100).is_ok());
  EXPECT_TRUE(reserve(b, 0));
  EXPECT_EQ(b.used(), 100u) << "nothing was there";
  written("fuller", 150);
  ASSERT_TRUE(a.rename(dir_ / "fuller", dir_ / "part", 150).is_ok());
  EXPECT_EQ(a.used(), 150u);
  // Removed by the other store, who has given its bytes back.
  EXPECT_TRUE(remove(b, "part", 150));
  written("fullest", 200);
  ASSERT_TRUE(a.rename(dir_ / "fullest", dir_ / "part", 200).is_ok());
  EXPECT_EQ(a.used(), 200u);
  EXPECT_EQ(a.rename(dir_ / "missing", dir_ / "part", 10).code(), StatusCode::NotFound);
  EXPECT_EQ(a.used(), 200u);
}

TEST_F(UsageTest, ManyAtOnceLoseNothing) {
  auto first = open();
  count(first, 0);
  std::vector<std::thread> threads;
  std::atomic<int> grants{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      auto usage = open();
      for (int n = 0; n < 300; ++n) {
        if (!reserve(usage, 50)) continue;
        ++grants;
        EXPECT_LE(usage.used(), kLimit);
        usage.release(50);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GT(grants, 0);
  EXPECT_TRUE(reserve(first, 0));
  EXPECT_EQ(first.used(), 0u);
}

TEST_F(UsageTest, AHolderThatIsKilledLeavesNoLock) {
  auto usage = open();
  count(usage, 5);
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::unique_ptr<LockedFile> file;
    const bool held = Env::posix().lock(dir_ / ".usage", 1, file).is_ok();
    [[maybe_unused]] const auto told = ::write(pipe[1], &held, 1);
    for (;;) ::pause();
  }
  bool held = false;
  ASSERT_EQ(::read(pipe[0], &held, 1), 1);
  EXPECT_TRUE(held);
  bool granted = true;
  EXPECT_EQ(usage.reserve(1, kLimit, granted).error_number(), EWOULDBLOCK) << "a living holder is waited for in vain";
  EXPECT_FALSE(granted);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(reserve(usage, 1));
  ::close(pipe[0]);
  ::close(pipe[1]);
}

}  // namespace
}  // namespace prefixcache::store
