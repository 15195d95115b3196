#include <random>
#include <vector>

#include <gtest/gtest.h>
#include <mlx/ops.h>
#include <mlx/transforms.h>

#include "gather/copy.h"
#include "prefixcache/slot.h"
#include "support/arrays.h"

namespace prefixcache::gather {
namespace {

namespace mx = mlx::core;

std::vector<std::uint8_t> run(const mx::array& source, int axis, std::int64_t lo, std::int64_t hi, std::size_t parts) {
  const RowCopy copy(source, axis, lo, hi);
  std::vector<std::uint8_t> out(copy.outer() * copy.strip_bytes());
  for (std::size_t p = 0; p < parts; ++p) {
    copy.run(out.data(), copy.outer() * p / parts, copy.outer() * (p + 1) / parts);
  }
  return out;
}

TEST(RowCopy, AnyRowsOfAnyStridesInAnyShares) {
  std::mt19937 random(2);
  for (int round = 0; round < 400; ++round) {
    const auto dtype = testing::all_dtypes()[random() % testing::all_dtypes().size()];
    const auto source = testing::strided_array(random, testing::random_shape(random, 1 + random() % 5), dtype);
    const int axis = static_cast<int>(random() % (source.ndim() + 1)) - 1;
    std::int64_t lo = 0, hi = 0;
    mx::array wanted = source;
    if (axis != kNoSeqAxis) {
      const std::int64_t rows = source.shape(axis);
      lo = static_cast<std::int64_t>(random()) % (rows + 1);
      hi = lo + static_cast<std::int64_t>(random()) % (rows - lo + 1);
      wanted = testing::rows_of(source, axis, lo, hi);
    }
    EXPECT_EQ(run(source, axis, lo, hi, 1 + random() % 3), testing::bytes_of(wanted))
        << "axis " << axis << ", rows " << lo << ".." << hi << ", rank " << source.ndim();
  }
}

TEST(RowCopy, ScalarsAndEmptyArrays) {
  const mx::array scalar(3.5f);
  EXPECT_EQ(run(scalar, kNoSeqAxis, 0, 0, 1), testing::bytes_of(scalar));
  const mx::array empty = mx::zeros({2, 0, 3});
  mx::array evaluated = empty;
  mx::eval(evaluated);
  EXPECT_TRUE(run(evaluated, 1, 0, 0, 1).empty());
  EXPECT_TRUE(run(evaluated, 0, 1, 2, 1).empty());
  EXPECT_TRUE(run(evaluated, kNoSeqAxis, 0, 0, 1).empty());
}

TEST(RowCopy, LongStripsOfContiguousRowsAreOneRun) {
  std::mt19937 random(3);
  const auto source = testing::random_array(random, {2, 300, 64}, mx::float32);
  EXPECT_EQ(run(source, 1, 17, 290, 2), testing::bytes_of(testing::rows_of(source, 1, 17, 290)));
}

}  // namespace
}  // namespace prefixcache::gather
