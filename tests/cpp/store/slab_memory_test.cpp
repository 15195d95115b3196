#include "store/slab_memory.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <mlx/memory.h>

#include "arrays/mlx_compat.h"
#include "support/heap_limit.h"

namespace prefixcache::store {
namespace {

constexpr std::uint64_t kPage = kMemoryPage;

class SlabMemoryTest : public ::testing::Test {
 protected:
  MemoryRange take(std::uint64_t pages) { return memory_->take(pages * kPage, limit_); }
  std::uint64_t held_pages() const { return memory_->held() / kPage; }
  std::uint64_t spare_pages() const { return memory_->spare() / kPage; }

  std::uint64_t limit_ = 64 * kPage;
  std::unique_ptr<Memory> memory_ = slab_memory();
};

TEST_F(SlabMemoryTest, ASlabIsAnArrayThatAKernelCanRead) {
  const auto range = take(2);
  ASSERT_NE(range.slab, nullptr);
  const Slab& slab = *range.slab;
  EXPECT_EQ(slab.memory.shape(), (mlx::core::Shape{8, 65536}));
  EXPECT_EQ(slab.memory.dtype().val(), mlx::core::uint8.val());
  EXPECT_TRUE(slab.memory.is_available());
  EXPECT_TRUE(slab.memory.flags().row_contiguous);
  EXPECT_EQ(slab.bytes, slab.memory.nbytes());
  EXPECT_EQ(slab.data, slab.memory.data<std::uint8_t>());
  EXPECT_EQ(range.data, slab.data + range.offset);
  EXPECT_EQ(range.size, 2 * kPage);
}

TEST_F(SlabMemoryTest, AHeapThatHasNothingLeftLosesNoAccount) {
  std::vector<MemoryRange> ranges;
  for (int i = 0; i < 3; ++i) ranges.push_back(take(2));
  ASSERT_EQ(spare_pages(), 2u);
  bool refused = false;
  testing::most = 0;
  try {
    take(1);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  const auto spare = spare_pages();
  memory_->give_back(ranges[0]);
  memory_->give_back(ranges[2]);
  testing::most = std::numeric_limits<std::size_t>::max();
  EXPECT_TRUE(refused);
  EXPECT_EQ(spare, 2u);
  EXPECT_EQ(held_pages(), 8u);
  // What could not be remembered is out of use; the rest works on.
  EXPECT_EQ(spare_pages(), 0u);
  memory_->give_back(ranges[1]);
  EXPECT_EQ(spare_pages(), 2u);
  std::set<std::uint8_t*> taken;
  for (auto range = take(1); range.data != nullptr; range = take(1)) EXPECT_TRUE(taken.insert(range.data).second);
  EXPECT_EQ(taken.size(), 64u - 6u);
  EXPECT_EQ(spare_pages(), 0u);
}

TEST_F(SlabMemoryTest, AnEighthOfTheLimitInWholePieces) {
  // Seven slabs of three pieces of three pages each: of 64 pages only the last one is left over, an eighth slab.
  std::vector<MemoryRange> ranges;
  for (auto range = take(3); range.data != nullptr; range = take(3)) ranges.push_back(range);
  EXPECT_EQ(ranges.size(), 21u);
  EXPECT_EQ(ranges[0].slab->bytes, 9 * kPage);
  EXPECT_EQ(ranges[2].slab, ranges[0].slab);
  EXPECT_NE(ranges[3].slab, ranges[0].slab);
  EXPECT_EQ(held_pages(), 63u);
  EXPECT_EQ(take(1).size, kPage);
  EXPECT_EQ(held_pages(), 64u);
  EXPECT_EQ(take(1).data, nullptr);
}

TEST_F(SlabMemoryTest, ALargerPieceHasASlabOfItsOwn) {
  const auto large = take(20);
  EXPECT_EQ(large.slab->bytes, 20 * kPage);
  EXPECT_EQ(take(1).slab->bytes, 8 * kPage);
  EXPECT_EQ(take(64).data, nullptr);
  EXPECT_EQ(take(65).data, nullptr);
  EXPECT_EQ(held_pages(), 28u);
}

TEST_F(SlabMemoryTest, ALimitOfNoWholePages) {
  limit_ = 3 * kPage + 17;
  std::vector<MemoryRange> ranges;
  for (auto range = take(1); range.data != nullptr; range = take(1)) ranges.push_back(range);
  EXPECT_EQ(ranges.size(), 3u);
  EXPECT_EQ(held_pages(), 3u);
  limit_ = kPage - 1;
  EXPECT_EQ(slab_memory()->take(kPage, limit_).data, nullptr);
}

TEST_F(SlabMemoryTest, TheBestFitIsTaken) {
  // In one slab: 3 free, 1 used, 1 free, 1 used, 2 free.
  memory_->give_back(take(1));
  auto three = take(3), used = take(1), one = take(1), also_used = take(1);
  const auto* first = three.data;
  const auto* between = one.data;
  memory_->give_back(std::move(three));
  memory_->give_back(std::move(one));
  EXPECT_EQ(held_pages(), 8u);
  EXPECT_EQ(take(1).data, between);
  EXPECT_EQ(take(2).data, also_used.data + kPage);
  EXPECT_EQ(take(2).data, first);
  EXPECT_EQ(held_pages(), 8u);
}

TEST_F(SlabMemoryTest, OfEqualsTheOneInTheOldestSlab) {
  std::vector<MemoryRange> ranges;
  for (int i = 0; i < 24; ++i) ranges.push_back(take(1));
  const auto* in_first = ranges[5].data;
  for (const std::size_t i : {20, 5, 12}) memory_->give_back(std::move(ranges[i]));
  EXPECT_EQ(take(1).data, in_first);
}

TEST_F(SlabMemoryTest, NeighboursGrowTogetherInAnyOrder) {
  for (const auto& order : {std::vector{0, 1, 2, 3}, {3, 2, 1, 0}, {0, 2, 1, 3}, {1, 3, 0, 2}}) {
    std::vector<MemoryRange> ranges;
    for (int i = 0; i < 4; ++i) ranges.push_back(take(2));
    EXPECT_EQ(spare_pages(), 0u);
    for (const int i : order) memory_->give_back(std::move(ranges[static_cast<std::size_t>(i)]));
    EXPECT_EQ(held_pages(), 8u);
    auto whole = take(8);
    EXPECT_EQ(held_pages(), 8u);
    EXPECT_EQ(whole.offset, 0u);
    memory_->give_back(std::move(whole));
  }
}

TEST_F(SlabMemoryTest, UnusedSlabsMakeRoomForALargerPiece) {
  std::vector<MemoryRange> ranges;
  for (int i = 0; i < 64; ++i) ranges.push_back(take(1));
  EXPECT_EQ(held_pages(), 64u);
  for (int i = 0; i < 16; ++i) memory_->give_back(std::move(ranges[static_cast<std::size_t>(i)]));
  // Not for one that would not fit even so.
  EXPECT_EQ(take(17).data, nullptr);
  EXPECT_EQ(held_pages(), 64u);
  EXPECT_EQ(take(16).slab->bytes, 16 * kPage);
  EXPECT_EQ(held_pages(), 64u);
  EXPECT_EQ(spare_pages(), 0u);
}

TEST_F(SlabMemoryTest, ShrinkingGivesUpOnlyWhatNobodyUses) {
  auto small = take(1);
  auto large = take(20);
  auto used = take(8);
  EXPECT_EQ(held_pages(), 36u);
  memory_->shrink(0);
  EXPECT_EQ(held_pages(), 36u);
  memory_->give_back(std::move(small));
  memory_->give_back(std::move(large));
  memory_->shrink(36 * kPage);
  EXPECT_EQ(held_pages(), 36u);
  memory_->shrink(35 * kPage);
  EXPECT_EQ(held_pages(), 16u) << "the largest goes first";
  memory_->shrink(0);
  EXPECT_EQ(held_pages(), 8u);
  std::memset(used.data, 1, used.size);
  memory_->give_back(std::move(used));
  memory_->shrink(0);
  EXPECT_EQ(held_pages(), 0u);
  EXPECT_EQ(spare_pages(), 0u);
}

TEST_F(SlabMemoryTest, WhoeverUsesMemoryKeepsItsSlab) {
  const auto range = take(1);
  memory_.reset();
  std::memset(range.data, 1, range.size);
}

// A device that gives `pages` in one piece and `in_all` together, and says no in either of MLX's ways.
class SmallDevice {
 public:
  SmallDevice(std::uint64_t pages, std::uint64_t in_all) : pages_(pages), in_all_(in_all) {}
  mlx::core::array operator()(mlx::core::Shape shape, mlx::core::Dtype dtype) const {
    const auto pages = static_cast<std::uint64_t>(shape[0]);
    if (pages > pages_) throw std::runtime_error("larger than a buffer may be");
    const std::uint64_t active = mlx::core::get_active_memory() - active_before_;
    if (active / kPage + pages > in_all_) throw std::bad_alloc();
    return make_uninitialised(std::move(shape), dtype);
  }

 private:
  std::uint64_t pages_;
  std::uint64_t in_all_;
  std::uint64_t active_before_ = mlx::core::get_active_memory();
};

TEST_F(SlabMemoryTest, ADeviceWithLessMemoryThanTheLimitGivesSmallerSlabs) {
  limit_ = 512 * kPage;
  memory_ = slab_memory(SmallDevice(20, 50));
  // Halves of 64 pages until they can be had, then what is wanted.
  std::vector<MemoryRange> ranges;
  for (auto range = take(2); range.data != nullptr; range = take(2)) ranges.push_back(range);
  EXPECT_EQ(ranges.size(), 25u);
  EXPECT_EQ(ranges[0].slab->bytes, 16 * kPage);
  EXPECT_EQ(ranges.back().slab->bytes, 2 * kPage);
  EXPECT_EQ(held_pages(), 50u);
}

TEST_F(SlabMemoryTest, AFullDeviceGetsBackWhatIsUnusedBeforeAnythingIsRefused) {
  limit_ = 512 * kPage;
  memory_ = slab_memory(SmallDevice(40, 50));
  memory_->give_back(take(2));
  auto used = take(2);
  EXPECT_EQ(take(40).data, nullptr);
  EXPECT_EQ(held_pages(), 32u) << "in use";
  memory_->give_back(std::move(used));
  const auto large = take(40);
  EXPECT_EQ(large.size, 40 * kPage);
  EXPECT_EQ(held_pages(), 40u);
  EXPECT_EQ(take(41).data, nullptr);
}

TEST_F(SlabMemoryTest, ALimitThatNoDeviceHasIsNoException) {
  limit_ = std::uint64_t{1} << 60;
  for (const std::uint64_t bytes : {limit_, limit_ / 2, std::uint64_t{1} << 47}) {
    EXPECT_EQ(memory_->take(bytes, limit_).data, nullptr);
  }
  EXPECT_EQ(held_pages(), 0u);
}

// Any order of taking and giving back, compared with a plain list of what is in use.
class Model {
 public:
  Model(std::uint32_t seed, std::uint64_t limit) : random_(seed), limit_(limit) {}

  void step() {
    const auto kind = random_() % 16;
    if (kind < 8) {
      take(1 + random_() % (random_() % 4 == 0 ? 24 : 6));
    } else if (kind < 15) {
      if (!used_.empty()) give_back(random_() % used_.size());
    } else {
      const std::uint64_t most = random_() % limit_;
      memory_->shrink(most);
      if (memory_->held() > most) {
        EXPECT_EQ(unused_bytes(), 0u);
      }
    }
    check();
  }

  void end() {
    while (!used_.empty()) give_back(random_() % used_.size());
    check();
    EXPECT_EQ(memory_->spare(), memory_->held());
    EXPECT_EQ(unused_bytes(), memory_->held()) << "all that is free has grown together";
    memory_->shrink(0);
    EXPECT_EQ(memory_->held(), 0u);
    EXPECT_EQ(mlx::core::get_active_memory(), active_before_);
  }

  int refused() const { return refused_; }

 private:
  struct Used {
    MemoryRange range;
    std::uint8_t mark;
  };

  void take(std::uint64_t pages) {
    const std::uint64_t want = pages * kPage;
    const bool fits = largest_free() >= want;
    const bool has_room = memory_->held() - unused_bytes() + want <= limit_;
    MemoryRange range = memory_->take(want, limit_);
    ASSERT_EQ(range.data != nullptr, fits || has_room);
    if (range.data == nullptr) {
      ++refused_;
      return;
    }
    EXPECT_EQ(range.size, want);
    EXPECT_EQ(range.offset % kPage, 0u);
    const auto mark = static_cast<std::uint8_t>(random_());
    for (std::uint64_t at = 0; at < range.size; at += kPage) range.data[at] = range.data[at + kPage - 1] = mark;
    slabs_.insert(range.slab);
    used_.push_back({std::move(range), mark});
  }

  void give_back(std::size_t i) {
    const auto& [range, mark] = used_[i];
    for (std::uint64_t at = 0; at < range.size; at += kPage) {
      EXPECT_TRUE(range.data[at] == mark && range.data[at + kPage - 1] == mark) << "somebody else wrote here";
    }
    memory_->give_back(std::move(used_[i].range));
    used_.erase(used_.begin() + static_cast<long>(i));
  }

  // Those that still exist, with the gaps between what is used of them.
  template <typename Visit>
  void visit_gaps(const Visit& visit) const {
    for (const auto& weak : slabs_) {
      const auto slab = weak.lock();
      if (slab == nullptr) continue;
      std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
      for (const auto& [range, mark] : used_) {
        if (range.slab == slab) ranges.emplace_back(range.offset, range.offset + range.size);
      }
      std::sort(ranges.begin(), ranges.end());
      std::uint64_t at = 0;
      for (const auto& [begin, end] : ranges) {
        ASSERT_LE(at, begin) << "two have the same memory";
        visit(*slab, begin - at);
        at = end;
      }
      ASSERT_LE(at, slab->bytes);
      visit(*slab, slab->bytes - at);
    }
  }

  std::uint64_t largest_free() const {
    std::uint64_t largest = 0;
    visit_gaps([&](const Slab&, std::uint64_t gap) { largest = std::max(largest, gap); });
    return largest;
  }

  std::uint64_t unused_bytes() const {
    std::uint64_t bytes = 0;
    visit_gaps([&](const Slab& slab, std::uint64_t gap) { bytes += gap == slab.bytes ? gap : 0; });
    return bytes;
  }

  void check() {
    std::uint64_t gaps = 0;
    visit_gaps([&](const Slab&, std::uint64_t gap) { gaps += gap; });
    std::uint64_t used = 0;
    for (const auto& [range, mark] : used_) used += range.size;
    EXPECT_EQ(memory_->spare(), gaps);
    EXPECT_EQ(memory_->held(), used + gaps);
    EXPECT_LE(memory_->held(), limit_);
    // What MLX has given out is what is counted.
    const std::uint64_t active = mlx::core::get_active_memory() - active_before_;
    EXPECT_GE(active, memory_->held());
    EXPECT_LE(active, memory_->held() + memory_->held() / 50);
  }

  std::mt19937 random_;
  const std::uint64_t limit_;
  const std::uint64_t active_before_ = mlx::core::get_active_memory();
  std::unique_ptr<Memory> memory_ = slab_memory();
  std::vector<Used> used_;
  std::set<std::weak_ptr<const Slab>, std::owner_less<>> slabs_;
  int refused_ = 0;
};

TEST(SlabMemoryModel, NothingOverlapsAndNothingIsLost) {
  int refused = 0;
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    Model model(seed, (1 + seed * 7 % 120) * kPage + (seed % 3) * 1000);
    for (int i = 0; i < 150 && !::testing::Test::HasFailure(); ++i) model.step();
    model.end();
    refused += model.refused();
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace prefixcache::store
