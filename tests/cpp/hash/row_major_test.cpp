#include "hash/row_major.h"

#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace prefixcache::hash {
namespace {

// All elements, one by one.
std::vector<std::uint8_t> reference(const StridedView& view) {
  std::vector<std::uint8_t> out;
  std::size_t count = 1;
  for (const std::int64_t extent : view.shape) count *= static_cast<std::size_t>(extent);
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t offset = 0;
    std::size_t rest = i;
    for (std::size_t axis = view.shape.size(); axis-- > 0;) {
      offset += static_cast<std::int64_t>(rest % view.shape[axis]) * view.strides[axis];
      rest /= view.shape[axis];
    }
    const std::uint8_t* item = view.data + offset * static_cast<std::int64_t>(view.item_size);
    out.insert(out.end(), item, item + view.item_size);
  }
  return out;
}

TEST(RowMajor, AnyRangeOfAnyStrides) {
  std::mt19937 random(5);
  std::vector<std::uint8_t> memory(1 << 16);
  for (auto& byte : memory) byte = static_cast<std::uint8_t>(random());
  for (int round = 0; round < 500; ++round) {
    StridedView view;
    view.item_size = std::size_t{1} << random() % 5;
    view.data = memory.data() + memory.size() / 2;
    std::size_t count = 1;
    for (unsigned axes = random() % 5; axes > 0; --axes) {
      view.shape.push_back(1 + random() % 5);
      view.strides.push_back(random() % 3 == 0 ? 1 : static_cast<std::int64_t>(random() % 60) - 20);
      count *= static_cast<std::size_t>(view.shape.back());
    }
    const auto all = reference(view);
    const std::size_t first = random() % count;
    const std::size_t size = random() % (count - first + 1);
    std::vector<std::uint8_t> out(size * view.item_size + 1, 0xAB);
    copy_row_major(view, first, size, out.data());
    EXPECT_EQ(out.back(), 0xAB) << "wrote too much";
    out.pop_back();
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first * view.item_size);
    EXPECT_EQ(out, std::vector<std::uint8_t>(begin, begin + static_cast<std::ptrdiff_t>(out.size()))) << round;
  }
}

}  // namespace
}  // namespace prefixcache::hash
