// Eight threads do everything at once on rows that tell where they belong: nobody ever gets another's.
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "support/full_size.h"
#include "support/store_fixture.h"

namespace prefixcache {
namespace {

using testing::Block;
using testing::chain;

constexpr unsigned kThreads = 8;
constexpr std::int64_t kSize = 8;
constexpr std::uint64_t kGroup = 9;

// What the threads have counted.
struct Counts {
  std::atomic<int> puts{0}, hits{0}, windows{0}, misses{0}, erased{0};
};

class StoreStress : public testing::StoreFixture {
 protected:
  StoreStress() {
    options_.ram_bytes = 6 * testing::kPage;
    options_.disk_bytes = 40 << 10;
    options_.queue_bytes = 8 * testing::kPage;
    options_.put_wait_seconds = 5;
    for (std::uint32_t c = 0; c < 6; ++c) chains_.push_back(chain(4, kSize, c));
    // Two ways on from the same beginning, and tails.
    chains_.push_back(chains_[0]);
    chains_.back().resize(2);
    const auto other = chain(2, kSize, 77, chains_[0][1].key, chains_[0][1].depth);
    chains_.back().insert(chains_.back().end(), other.begin(), other.end());
  }

  // Runs `body(store, random)` in eight threads until time is up. `current` gives the store to use.
  template <typename Current, typename Body>
  void run(const Current& current, const Body& body) {
    const auto until = std::chrono::steady_clock::now() + testing::stress_time();
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        while (std::chrono::steady_clock::now() < until && !HasFailure()) body(*current(), random);
      });
    }
    for (auto& thread : threads) thread.join();
  }

  void expect_known(const Status& status) {
    const auto code = status.code();
    EXPECT_TRUE(code == StatusCode::Ok || code == StatusCode::Full || code == StatusCode::Closed) << status.message();
  }

  void put(BlockStore& store, std::mt19937& random, const std::vector<Block>& blocks) {
    const std::size_t count = 1 + random() % blocks.size();
    for (std::size_t i = 0; i < count; ++i) {
      expect_known(put_block(store, blocks[i]));
      // The rows of a window: the later, the more of them.
      const std::int64_t lo = blocks[i].start() + static_cast<std::int64_t>(random() % kSize);
      expect_known(put_window(store, blocks[i], lo, blocks[i].depth, kGroup));
    }
    expect_known(put_state(store, blocks[count - 1]));
    expect_known(put_block(store, testing::tail_of(blocks[count - 1], 1 + random() % (kSize - 1))));
    ++counts_.puts;
  }

  void gather(BlockStore& store, std::mt19937& random, const std::vector<Block>& blocks) {
    const auto found = store.longest_prefix(keys_of(blocks), testing::test_root(), kSize, Part::kv);
    if (found == 0) return;
    const std::vector<Block> prefix(blocks.begin(), blocks.begin() + static_cast<long>(found));
    const std::int64_t hi = prefix.back().depth - static_cast<std::int64_t>(random() % kSize);
    const Gathered gathered = store.gather(testing::request_for(prefix, 0, hi, hi + 3));
    if (gathered.status.is_ok()) testing::expect_rows(gathered, prefix, 0, hi, hi + 3);
    ++(gathered.status.is_ok() ? counts_.hits : counts_.misses);
  }

  void read_window(BlockStore& store, const Block& block) {
    const Key key = group_key(block.key, kGroup);
    const PartInfo info = store.presence(std::vector<Key>{key})[0].parts[static_cast<int>(Part::win)];
    if (!info.present || info.row_lo < 0) return;
    auto request = testing::request_for({block}, info.row_lo, info.row_hi);
    request.part = Part::win;
    request.group = kGroup;
    const Gathered gathered = store.gather(request);
    if (gathered.status.is_ok()) testing::expect_rows(gathered, {block}, info.row_lo, info.row_hi);
    ++(gathered.status.is_ok() ? counts_.windows : counts_.misses);
  }

  void look_up(BlockStore& store, const std::vector<Block>& blocks) {
    std::vector<std::uint32_t> tokens;
    for (const auto& block : blocks) tokens.insert(tokens.end(), block.tokens.begin(), block.tokens.end());
    const auto keys = keys_of(blocks);
    const ChainView view{testing::test_root(), keys, kSize, tokens, {}};
    const auto limit = static_cast<std::int64_t>(tokens.size());
    EXPECT_LE(store.deepest_window(view, {12, 0, kGroup}, limit).n, limit);
    const Point state = store.deepest_state(view, limit);
    EXPECT_LE(store.deepest_fork(view, limit), limit);
    if (state.n > 0) {
      const Block& block = blocks[static_cast<std::size_t>(state.n / kSize - 1)];
      EXPECT_EQ(state.last, block.key);
      const Gathered loaded = store.load(state.last, Part::state);
      if (loaded.status.is_ok()) testing::expect_rows(loaded, {block}, 0, 0, 0, testing::one_state());
    }
    for (const auto& child : store.children(blocks[0].key)) EXPECT_GT(child.depth, blocks[0].depth);
    EXPECT_LE(store.longest_child(blocks[0].key, kSize, blocks[1].tokens, {}, Part::kv).rows, kSize);
  }

  void step(BlockStore& store, std::mt19937& random) {
    const auto& blocks = chains_[random() % chains_.size()];
    const auto& block = blocks[random() % blocks.size()];
    const auto kind = random() % 100;
    if (kind < 25) {
      put(store, random, blocks);
    } else if (kind < 55) {
      gather(store, random, blocks);
    } else if (kind < 70) {
      read_window(store, block);
    } else if (kind < 85) {
      look_up(store, blocks);
    } else if (kind < 93) {
      const Key keys[] = {block.key, group_key(block.key, kGroup)};
      const std::vector<Part> parts = {Part::kv, Part::win, Part::state};
      expect_known(store.erase(keys, parts));
      ++counts_.erased;
    } else if (kind < 96) {
      expect_known(store.flush());
    } else if (kind < 98) {
      store.touch(block.key, Part::kv);
      const StoreStats stats = store.stats();
      EXPECT_LE(stats.ram_bytes, options_.ram_bytes);
    } else if (kind < 99) {
      expect_known(store.clear());
    } else {
      store.presence(keys_of(blocks));
      store.trim_ram(random() % options_.ram_bytes, std::vector<Key>{block.key});
    }
  }

  // What the index says is there can be had.
  void expect_consistent(BlockStore& store) {
    EXPECT_TRUE(store.flush().is_ok());
    const StoreStats stats = store.stats();
    EXPECT_EQ(stats.queued_bytes, 0u);
    EXPECT_LE(stats.ram_peak_bytes, options_.ram_bytes);
    // A count of the directory while others write adds what it may have missed.
    EXPECT_GE(stats.disk_bytes, dir_.bytes());
    EXPECT_LE(stats.disk_bytes, options_.disk_bytes);
    counts_.misses = 0;
    for (const auto& blocks : chains_) {
      std::mt19937 all_rows(0);
      gather(store, all_rows, blocks);
      for (const auto& block : blocks) read_window(store, block);
    }
    EXPECT_EQ(counts_.misses, 0) << store.stats().last_error;
  }

  std::vector<std::vector<Block>> chains_;
  Counts counts_;
};

struct Kind {
  const char* name;
  Verify verify;
  bool arena;
};

class OneStore : public StoreStress, public ::testing::WithParamInterface<Kind> {};

TEST_P(OneStore, NothingIsMixedUp) {
  options_.verify = GetParam().verify;
  arena_ = GetParam().arena;
  // Slabs of several parts.
  if (arena_) options_.ram_bytes = 24 * testing::kPage;
  const auto store = open();
  run([&] { return store.get(); }, [&](BlockStore& one, std::mt19937& random) { step(one, random); });
  EXPECT_GT(counts_.puts, 0);
  EXPECT_GT(counts_.hits, 0);
  EXPECT_GT(counts_.windows, 0);
  EXPECT_EQ(store->stats().corrupt_parts, 0u) << store->stats().last_error;
  EXPECT_EQ(store->stats().lost_parts, 0u) << store->stats().last_error;
  EXPECT_FALSE(store->stats().degraded) << store->stats().last_error;
  expect_consistent(*store);
}

INSTANTIATE_TEST_SUITE_P(Kinds, OneStore,
                         ::testing::Values(Kind{"first", Verify::first, false}, Kind{"always", Verify::always, false},
                                           Kind{"arena", Verify::first, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(StoreStress, UnderAStoreThatIsClosedAndOpenedAgain) {
  std::mutex mutex;
  std::shared_ptr<BlockStore> store = open();
  const auto current = [&] {
    std::lock_guard lock(mutex);
    return store;
  };
  std::atomic<int> closed{0};
  run(current, [&](BlockStore& one, std::mt19937& random) {
    if (random() % 200 != 0) return step(one, random);
    // The others still use it, and find out.
    one.close();
    ++closed;
    std::shared_ptr<BlockStore> next = open();
    std::lock_guard lock(mutex);
    store = std::move(next);
  });
  EXPECT_GT(closed, 0);
  EXPECT_GT(counts_.hits, 0);
  store.reset();
  store = open();
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
  std::mt19937 random(1);
  for (const auto& blocks : chains_) gather(*store, random, blocks);
  EXPECT_EQ(store->stats().corrupt_parts, 0u) << store->stats().last_error;
}

TEST_F(StoreStress, TwoStoresOnOneDirectory) {
  const auto one = open();
  options_.name_space = "test";
  const auto two = open();
  std::atomic<unsigned> turn{0};
  run([&] { return ++turn % 2 == 0 ? one.get() : two.get(); },
      [&](BlockStore& store, std::mt19937& random) { step(store, random); });
  EXPECT_GT(counts_.hits, 0);
  for (BlockStore* store : {one.get(), two.get()}) {
    EXPECT_TRUE(store->flush().is_ok()) << store->stats().last_error;
    EXPECT_EQ(store->stats().corrupt_parts, 0u) << store->stats().last_error;
    std::mt19937 random(1);
    for (const auto& blocks : chains_) gather(*store, random, blocks);
  }
}

}  // namespace
}  // namespace prefixcache
