#include <functional>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gather/kernel_table.h"

namespace prefixcache::gather {
namespace {

namespace mx = mlx::core;
using ::testing::ElementsAre;

// 3 images of 4 rows, 2 heads of 16 bytes, two tensors.
KernelRequest request_of_two_pieces() {
  KernelRequest request;
  request.slab_bytes = {800};
  request.heads = 2;
  request.row_bytes = 16;
  request.rows = 6;
  request.capacity = 9;
  request.pieces = {{0, 512, 256, 0, 4, 1, 4, 0}, {0, 0, 256, 0, 4, 0, 3, 3}};
  request.tensors = {{{0}, mx::float16}, {{128}, mx::float16}};
  return request;
}

TEST(KernelTable, CountsInTheWidestUnit) {
  const auto table = make_kernel_table(request_of_two_pieces(), KernelTile{2, 1});
  EXPECT_EQ(table.unit_bytes, 16);
  const std::uint64_t cleared = kClearedSlab << kSlabShift;
  EXPECT_THAT(table.words, ElementsAre(2, 9, 2, 0,        // tiles of a piece, stride of the outputs' heads, tensors
                                       33, 4, 3, 0,       // image 2, row 1
                                       0, 4, 3, 3,        // image 0
                                       cleared, 0, 3, 6,  // spare rows
                                       0, 8,              // tensors
                                       0, 0, 0, 0, 0, 0, 0));
  EXPECT_EQ(table.tensors_at, 16u);
  EXPECT_EQ(table.groups, 6u);
}

TEST(KernelTable, OneOddOffsetMakesUnitsNarrow) {
  auto request = request_of_two_pieces();
  request.tensors[1].offsets = {124};
  EXPECT_EQ(make_kernel_table(request).unit_bytes, 4);
  request.tensors[1].offsets = {126};
  EXPECT_EQ(make_kernel_table(request).unit_bytes, 1);
  request = request_of_two_pieces();
  request.pieces[0].at = 516;
  EXPECT_EQ(make_kernel_table(request).unit_bytes, 4);
}

TEST(KernelTable, ShortRowsMoveInWideUnitsWhereBlocksAllow) {
  KernelRequest request;
  request.slab_bytes = {4096};
  request.row_bytes = 4;
  request.rows = request.capacity = 512;
  request.pieces = {{0, 1024, 1024, 0, 256, 0, 256, 0}, {0, 0, 1024, 0, 256, 0, 256, 256}};
  request.tensors = {{{0}, mx::float16}};
  EXPECT_EQ(make_kernel_table(request).unit_bytes, 16);
  request.pieces[1].hi = 255;
  request.rows = 511;
  EXPECT_EQ(make_kernel_table(request).unit_bytes, 4);
}

TEST(KernelTable, BlocksOfOtherLengthsHaveTheirTensorsElsewhere) {
  auto request = request_of_two_pieces();
  // The second block has 3 rows only.
  request.pieces[1] = {0, 0, 192, 1, 3, 0, 3, 3};
  request.tensors = {{{0, 0}, mx::float16}, {{128, 96}, mx::float16}};
  const auto table = make_kernel_table(request, KernelTile{2, 1});
  const std::vector<std::uint64_t> tensors(table.words.begin() + static_cast<std::ptrdiff_t>(table.tensors_at),
                                           table.words.end());
  EXPECT_THAT(tensors, ElementsAre(0, 8, 0, 6, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_EQ(table.words[2], 2u);
  EXPECT_EQ(table.words[kHeaderWords + 2], 3u);
  EXPECT_EQ(table.words[kHeaderWords + kPieceWords + 1], 3u);
  EXPECT_EQ(table.words[kHeaderWords + kPieceWords + 2], std::uint64_t{1} << kLayoutShift | 3);
}

TEST(KernelTable, NothingToDoIsNoLaunch) {
  auto request = request_of_two_pieces();
  request.pieces.clear();
  request.clear_spare = false;
  EXPECT_EQ(make_kernel_table(request).groups, 0u);
  request.rows = request.capacity = 0;
  request.clear_spare = true;
  EXPECT_EQ(make_kernel_table(request).groups, 0u);
}

TEST(KernelTable, SpareRowsAreLeftWhereNobodyAsksForZeros) {
  auto request = request_of_two_pieces();
  request.clear_spare = false;
  EXPECT_EQ(make_kernel_table(request).tensors_at, kHeaderWords + 2 * kPieceWords);
}

TEST(KernelTable, MuchRoomIsClearedInPiecesOfABlock) {
  auto request = request_of_two_pieces();
  request.capacity = 6 + 2000;
  const auto table = make_kernel_table(request, KernelTile{8, 4});
  EXPECT_EQ(table.words[0], 1u);
  EXPECT_EQ(table.tensors_at, kHeaderWords + (2 + 63) * kPieceWords);
}

TEST(KernelTable, RefusesWhatWouldReachOutside) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const std::vector<std::function<void(KernelRequest&)>> wrongs = {
      [](auto& r) { r.pieces[0].at = 768; },
      [](auto& r) { r.pieces[0].at = std::numeric_limits<std::uint64_t>::max(); },
      [](auto& r) { r.pieces[0].bytes = 289; },
      [](auto& r) { r.pieces[0].bytes = 255; },
      [](auto& r) { r.pieces[0].slab = 1; },
      [](auto& r) { r.pieces[0].layout = 1; },
      [](auto& r) { r.slab_bytes[0] = 767; },
      [](auto& r) { r.slab_bytes.clear(); },
      [](auto& r) { r.pieces[0].lo = -1; },
      [](auto& r) { r.pieces[0].lo = 5; },
      [](auto& r) { r.pieces[0].hi = 5; },
      [](auto& r) { r.pieces[0].stored = 5; },
      [](auto& r) { r.pieces[1].stored = kHuge; },
      [](auto& r) { r.pieces[1].place = 2; },
      [](auto& r) { r.pieces[1].place = 4; },
      [](auto& r) { r.pieces[1].place = kHuge; },
      [](auto& r) { r.pieces.push_back({0, 0, 256, 0, 4, 0, 1, 6}); },
      [](auto& r) { r.capacity = 5; },
      [](auto& r) { r.capacity = kHuge; },
      [](auto& r) { r.capacity = std::int64_t{1} << 50; },
      [](auto& r) { r.rows = -1; },
      [](auto& r) { r.rows = 5; },
      [](auto& r) { r.tensors[1].offsets = {129}; },
      [](auto& r) { r.tensors[1].offsets = {std::numeric_limits<std::uint64_t>::max()}; },
      [](auto& r) { r.tensors[1].offsets = {128, 128}; },
      [](auto& r) { r.tensors[0].offsets = r.tensors[1].offsets = {}; },
      [](auto& r) { r.tensors[1].dtype = mx::bfloat16; },
      [](auto& r) { r.tensors.clear(); },
      [](auto& r) { r.row_bytes = 0; },
      [](auto& r) { r.row_bytes = 15; },
      [](auto& r) { r.heads = 0; },
      [](auto& r) { r.heads = 3; },
      [](auto& r) { r.heads = 70000; },
  };
  ASSERT_NO_THROW(make_kernel_table(request_of_two_pieces()));
  for (std::size_t i = 0; i < wrongs.size(); ++i) {
    auto request = request_of_two_pieces();
    wrongs[i](request);
    EXPECT_THROW(make_kernel_table(request), std::invalid_argument) << "wrong number " << i;
  }
}

TEST(KernelTable, SaysWhatIsWrong) {
  const auto refusal = [](auto change) -> std::string {
    auto request = request_of_two_pieces();
    change(request);
    try {
      make_kernel_table(request);
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(refusal([](auto& r) { r.pieces[1].slab = 9; }), "[gather_kernel] piece 1 names slab 9 of 1");
  EXPECT_EQ(refusal([](auto& r) { r.pieces[1].at = 768; }),
            "[gather_kernel] piece 1 lies at bytes 768 to 1024 of a slab of 800");
  EXPECT_EQ(refusal([](auto& r) { r.rows = 5; }),
            "[gather_kernel] the table is longer than the output: piece 1 ends at row 6 of 5");
  EXPECT_EQ(refusal([](auto& r) { r.capacity = 5; }), "[gather_kernel] a capacity of 5 for 6 rows");
  EXPECT_EQ(refusal([](auto& r) { r.tensors[0].dtype = mx::uint16; }),
            "[gather_kernel] tensors of several dtypes in one launch");
}

}  // namespace
}  // namespace prefixcache::gather
