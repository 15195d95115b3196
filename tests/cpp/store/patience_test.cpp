#include "store/patience.h"

#include <atomic>
#include <chrono>
#include <future>

#include <gtest/gtest.h>

#include "support/no_threads.h"

namespace prefixcache::store {
namespace {

TEST(Patience, WhatEndsInTimeHasEnded) {
  Patience patience;
  for (int i = 0; i < 200; ++i) {
    auto value = std::make_shared<int>(0);
    ASSERT_TRUE(patience.run([value, i] { *value = i; }, 60));
    EXPECT_EQ(*value, i);
    EXPECT_EQ(value.use_count(), 1) << "what the work owned has gone";
  }
  EXPECT_FALSE(patience.overrun());
}

TEST(Patience, WhatOverrunsGoesOnAloneAndNothingIsBegunMeanwhile) {
  Patience patience;
  std::promise<void> gate;
  const auto opened = gate.get_future().share();
  const auto ended = std::make_shared<std::atomic<bool>>(false);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(patience.run(
      [opened, ended] {
        opened.wait();
        *ended = true;
      },
      0.02));
  EXPECT_TRUE(patience.overrun());
  bool ran = false;
  EXPECT_FALSE(patience.run([&] { ran = true; }, 60));
  EXPECT_FALSE(ran);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_FALSE(*ended);
  gate.set_value();
  while (patience.overrun()) std::this_thread::yield();
  EXPECT_TRUE(*ended);
  EXPECT_TRUE(patience.run([&] { ran = true; }, 60));
  EXPECT_TRUE(ran);
}

TEST(Patience, CallersDoNotWaitForEachOther) {
  Patience patience;
  std::promise<void> gate;
  const auto opened = gate.get_future().share();
  std::thread first([&] { EXPECT_TRUE(patience.run([opened] { opened.wait(); }, 60)); });
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(patience.run([] {}, 60));
  gate.set_value();
  first.join();
}

TEST(Patience, WhereThereIsNoThreadNothingIsRunUntilThereIs) {
  if (!testing::kCanRefuseThreads) GTEST_SKIP() << "this C library has no default size of stacks";
  Patience patience;
  bool ran = false;
  {
    const testing::NoThreads none;
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(patience.run([&] { ran = true; }, 60));
    EXPECT_FALSE(patience.overrun()) << "nothing is under way";
    // One that never had a thread ends too.
    Patience another;
    EXPECT_FALSE(another.run([&] { ran = true; }, 60));
  }
  EXPECT_FALSE(ran);
  EXPECT_TRUE(patience.run([&] { ran = true; }, 60));
  EXPECT_TRUE(ran);
}

TEST(Patience, TheEndWaitsForWhatWasLeftAlone) {
  std::promise<void> gate;
  const auto opened = gate.get_future().share();
  const auto ended = std::make_shared<std::atomic<bool>>(false);
  std::thread opener;
  {
    Patience patience;
    EXPECT_FALSE(patience.run(
        [opened, ended] {
          opened.wait();
          *ended = true;
        },
        0.01));
    opener = std::thread([&] { gate.set_value(); });
  }
  EXPECT_TRUE(*ended);
  opener.join();
}

}  // namespace
}  // namespace prefixcache::store
