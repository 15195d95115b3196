#include "gather/thread_pool.h"

#include <numeric>
#include <set>
#include <stdexcept>

#include <gtest/gtest.h>

#include "support/no_threads.h"

namespace prefixcache::gather {
namespace {

TEST(ThreadPool, RunsEveryItemOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const std::size_t count : {0u, 1u, 2u, 3u, 1000u}) {
      std::vector<std::atomic<int>> runs(count);
      pool.parallel_for(count, [&](std::size_t i) { ++runs[i]; });
      for (const auto& n : runs) EXPECT_EQ(n, 1);
    }
  }
}

TEST(ThreadPool, ZeroMeansOneACoreUpToEight) {
  const int threads = ThreadPool(0).threads();
  EXPECT_GE(threads, 1);
  EXPECT_LE(threads, 8);
}

TEST(ThreadPool, TheCallerDoesItAllWhereThereIsNoThread) {
  if (!testing::kCanRefuseThreads) GTEST_SKIP() << "this C library has no default size of stacks";
  const testing::NoThreads none;
  ThreadPool pool(4);
  EXPECT_EQ(pool.threads(), 1);
  int runs = 0;
  pool.parallel_for(100, [&](std::size_t) { ++runs; });
  EXPECT_EQ(runs, 100);
}

TEST(ThreadPool, TheCallerHelps) {
  ThreadPool pool(2);
  // The one worker cannot do both at once, and neither ends before the other has begun.
  std::atomic<int> begun{0};
  std::mutex mutex;
  std::set<std::thread::id> who;
  pool.parallel_for(2, [&](std::size_t) {
    {
      std::lock_guard lock(mutex);
      who.insert(std::this_thread::get_id());
    }
    ++begun;
    while (begun < 2) std::this_thread::yield();
  });
  EXPECT_EQ(who.size(), 2u);
  EXPECT_TRUE(who.contains(std::this_thread::get_id()));
}

TEST(ThreadPool, SeveralCallersShareTheWorkers) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<long> total{0};
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        std::vector<long> out(17);
        pool.parallel_for(out.size(), [&](std::size_t i) { out[i] = static_cast<long>(i); });
        // Everything is written when the call returns.
        total += std::accumulate(out.begin(), out.end(), 0l);
      }
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(total, 6l * 200 * 136);
}

TEST(ThreadPool, WhatABodyThrowsReachesTheCallerAfterTheOthersEnded) {
  for (const int threads : {2, 4}) {
    ThreadPool pool(threads);
    std::atomic<int> ran{0};
    const auto body = [&](std::size_t i) {
      ++ran;
      if (i == 3) throw std::runtime_error("item 3");
    };
    try {
      pool.parallel_for(50, body);
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "item 3");
    }
    EXPECT_EQ(ran, 50);
    ran = 0;
    pool.parallel_for(3, body);
    EXPECT_EQ(ran, 3);
  }
}

}  // namespace
}  // namespace prefixcache::gather
