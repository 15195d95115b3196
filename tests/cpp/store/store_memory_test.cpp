// The bound on the RAM tier, measured by the system: what this process holds while parts of many sizes pass through.
//
// Not counted is what the bound does not cover (docs/operations.md): the index, about a kilobyte a part.
#include <algorithm>
#include <atomic>
#include <fstream>
#include <sstream>
#include <thread>

#include <gtest/gtest.h>

#include "support/store_fixture.h"

namespace prefixcache {
namespace {

using testing::Block;
using testing::chain;

constexpr std::uint64_t kRam = 64 << 20;
constexpr std::uint64_t kIndexBytes = 1024;
// Below a small page, odd ones, below and above a huge page, a seventh of the tier.
constexpr std::uint64_t kSizes[] = {40 << 10, 300'004, (1 << 20) - 4, 3'400'000, 9 << 20};
constexpr int kRounds = 40;

// Bytes of memory that is no file's; 0 where the system does not say.
std::uint64_t anonymous_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("Anonymous:")) continue;
    std::uint64_t kilobytes = 0;
    std::istringstream(line.substr(line.find(':') + 1)) >> kilobytes;
    return kilobytes << 10;
  }
  return 0;
}

// Looks all the time, from another thread.
class Peak {
 public:
  Peak() : before_(anonymous_bytes()), most_(before_), thread_([this] { look(); }) {}
  ~Peak() { end(); }
  // What was held at most beyond what was held at first.
  std::uint64_t end() {
    ended_ = true;
    if (thread_.joinable()) thread_.join();
    return most_ - before_;
  }

 private:
  void look() {
    while (!ended_) most_ = std::max(most_, anonymous_bytes());
  }
  const std::uint64_t before_;
  std::uint64_t most_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

class StoreMemory : public testing::StoreFixture, public ::testing::WithParamInterface<WritePolicy> {
 protected:
  StoreMemory() {
    options_.env = nullptr;
    options_.ram_bytes = kRam;
    options_.disk_bytes = 2 * kRam;
    options_.put_wait_seconds = 60;
    options_.write = GetParam();
    for (const std::uint64_t size : kSizes) {
      arrays_.push_back(make_uninitialised({4, static_cast<int>(size / 4)}, mlx::core::uint8));
      std::fill_n(arrays_.back().data<std::uint8_t>(), size / 4 * 4, std::uint8_t{7});
    }
  }
  Status put(BlockStore& store, const Block& block, std::size_t size) {
    const SlotInput slots[] = {{"keys", arrays_[size], 0, 0}};
    PutRequest request;
    request.key = block.key;
    request.parent = block.parent;
    request.depth = block.depth;
    request.row_hi = block.depth;
    request.tokens = block.tokens;
    request.slots = slots;
    return store.put(request);
  }
  // Threads, tables and whatever else stays after the first use.
  void warm_up(BlockStore& store) {
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      ASSERT_TRUE(put(store, chain(1, 4, 1000 + static_cast<std::uint32_t>(i))[0], i).is_ok());
    }
    ASSERT_TRUE(store.flush().is_ok());
    ASSERT_TRUE(store.clear().is_ok());
    store.trim_ram(0);
    ASSERT_EQ(store.stats().ram_bytes, 0u);
  }

  std::vector<mlx::core::array> arrays_;
};

TEST_P(StoreMemory, TheRamTierKeepsItsBoundByTheSystemsCount) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's own memory would be counted";
#endif
  if (anonymous_bytes() == 0) GTEST_SKIP() << "no /proc/self/smaps_rollup here";
  const auto store = open();
  warm_up(*store);
  Peak peak;
  std::uint64_t most_parts = 0;
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      // Another order of sizes each time, so that recycled memory fits now and then.
      const std::size_t size = (i * 3 + static_cast<std::size_t>(round) * 2) % arrays_.size();
      const auto number = static_cast<std::uint32_t>(round) * 10 + static_cast<std::uint32_t>(i);
      ASSERT_TRUE(put(*store, chain(1, 4, number)[0], size).is_ok());
      most_parts = std::max(most_parts, store->stats().parts);
    }
  }
  EXPECT_TRUE(store->flush().is_ok());
  const std::uint64_t held = peak.end();
  EXPECT_LE(held, kRam + kRam / 50 + most_parts * kIndexBytes);
  EXPECT_GE(held, kRam / 10 * 8) << "the tier was never full";
  EXPECT_LE(store->stats().ram_peak_bytes, kRam);
  EXPECT_GT(store->stats().evicted_ram_parts, 0u);
  EXPECT_EQ(store->stats().put_full, 0u);
}

std::string name_of(const ::testing::TestParamInfo<WritePolicy>& info) {
  if (info.param == WritePolicy::ram_only) return "RamOnly";
  return info.param == WritePolicy::back ? "Back" : "Through";
}

INSTANTIATE_TEST_SUITE_P(Policies, StoreMemory,
                         ::testing::Values(WritePolicy::through, WritePolicy::back, WritePolicy::ram_only), name_of);

}  // namespace
}  // namespace prefixcache
