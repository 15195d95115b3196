#include "store/gather_plan.h"

#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "support/blocks.h"

namespace prefixcache::store {
namespace {

using testing::Block;
using testing::chain;
using testing::SlotSpec;

class GatherPlanTest : public ::testing::Test {
 protected:
  // A block in RAM with rows [lo, hi).
  void add(const Block& block, const std::vector<SlotSpec>& specs, std::int64_t lo, std::int64_t hi) {
    auto image = std::make_shared<Image>();
    auto& header = image->header;
    header.key = block.key;
    header.depth = block.depth;
    header.row_lo = lo;
    header.row_hi = hi;
    for (const auto& spec : specs) {
      layout::TensorInfo tensor;
      tensor.name = spec.name;
      tensor.dtype = spec.dtype;
      tensor.shape = spec.shape;
      tensor.seq_axis = spec.seq_axis;
      if (spec.seq_axis >= 0) tensor.shape[static_cast<std::size_t>(spec.seq_axis)] = static_cast<int>(hi - lo);
      header.tensors.push_back(tensor);
    }
    image->data_bytes = layout::place_tensors(header.tensors);
    image->buffer = pool_->acquire(image->data_bytes);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const auto bytes = testing::expected_bytes(specs[i], {block}, lo, hi);
      if (!bytes.empty()) std::memcpy(image->buffer->data() + header.tensors[i].offset, bytes.data(), bytes.size());
    }
    sources_.push_back({image, nullptr});
  }
  void add(const Block& block, const std::vector<SlotSpec>& specs) { add(block, specs, block.start(), block.depth); }

  Status make(const GatherRequest& request) { return GatherPlan::make(request, sources_, plan_, bad_); }

  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>(64 << 20);
  std::vector<Source> sources_;
  GatherPlan plan_;
  std::size_t bad_ = 99;
  gather::ThreadPool threads_{2};
};

const SlotSpec kKeys{"keys", mlx::core::float16, {2, 0, 4}, 1};
const SlotSpec kState{"state", mlx::core::float32, {3}, kNoSeqAxis};

TEST_F(GatherPlanTest, BlocksOfAnySizeThatFollowEachOther) {
  const auto first = chain(1, 3), second = chain(1, 8, 1, first[0].key, 3), third = chain(1, 1, 2, second[0].key, 11);
  const std::vector<Block> blocks = {first[0], second[0], third[0]};
  for (const auto& block : blocks) add(block, {kKeys});
  ASSERT_TRUE(make(testing::request_for(blocks, 2, 12, 15)).is_ok());
  ASSERT_TRUE(plan_.allocate().is_ok());
  for (const auto& status : plan_.run(threads_, Verify::first)) EXPECT_TRUE(status.is_ok());
  EXPECT_EQ(plan_.bytes_of(0), 1u * 2 * 8);
  EXPECT_EQ(plan_.bytes_of(1), 8u * 2 * 8);
  EXPECT_EQ(plan_.bytes_of(2), 1u * 2 * 8);
  const auto results = plan_.take_results();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(testing::contiguous_bytes(results[0].array) == testing::expected_bytes(kKeys, blocks, 2, 12, 5));
}

TEST_F(GatherPlanTest, TheFirstBlockThatDoesNotFitIsNamed) {
  const auto blocks = chain(3, 4);
  add(blocks[0], {kKeys});
  add(blocks[1], {kKeys}, 4, 7);
  add(blocks[2], {kKeys});
  EXPECT_EQ(make(testing::request_for(blocks)).code(), StatusCode::NotFound);
  EXPECT_EQ(bad_, 2u) << "row 7 is missing between blocks 1 and 2";

  sources_.clear();
  add(blocks[0], {kKeys}, 1, 4);
  plan_ = {};
  EXPECT_EQ(make(testing::request_for({blocks[0]})).code(), StatusCode::NotFound);
  EXPECT_EQ(bad_, 0u) << "row 0 is missing";

  plan_ = {};
  EXPECT_EQ(make(testing::request_for({blocks[0]}, 1, 5)).code(), StatusCode::NotFound);
  EXPECT_EQ(bad_, 0u) << "row 4 is missing";
}

TEST_F(GatherPlanTest, ASlotInAnotherFormIsNamedByItsBlock) {
  const auto blocks = chain(2, 4);
  const std::vector<SlotSpec> others = {
      {"keys", mlx::core::bfloat16, {2, 0, 4}, 1},   {"keys", mlx::core::float16, {2, 0, 5}, 1},
      {"keys", mlx::core::float16, {2, 0, 4, 1}, 1}, {"keys", mlx::core::float16, {2, 4, 0}, 2},
      {"values", mlx::core::float16, {2, 0, 4}, 1},
  };
  for (const auto& other : others) {
    sources_.clear();
    plan_ = {};
    add(blocks[0], {other});
    add(blocks[1], {kKeys});
    EXPECT_EQ(make(testing::request_for(blocks)).code(), StatusCode::Corrupt);
    EXPECT_EQ(bad_, 1u);
  }
}

TEST_F(GatherPlanTest, WholeArraysComeFromTheLastBlock) {
  const auto blocks = chain(2, 4);
  for (const auto& block : blocks) add(block, {kState, kKeys});
  auto request = testing::request_for(blocks);
  request.slots = {"keys", "state"};
  ASSERT_TRUE(make(request).is_ok());
  ASSERT_TRUE(plan_.allocate().is_ok());
  plan_.run(threads_, Verify::first);
  const auto results = plan_.take_results();
  ASSERT_EQ(results.size(), 2u);
  EXPECT_EQ(results[0].name, "keys");
  EXPECT_EQ(results[1].name, "state");
  EXPECT_TRUE(testing::contiguous_bytes(results[1].array) == testing::expected_bytes(kState, blocks, 0, 8));

  plan_ = {};
  request.slots = {"keys", "bias"};
  const Status status = make(request);
  EXPECT_EQ(status.code(), StatusCode::NotFound);
  EXPECT_NE(status.message().find("bias"), std::string::npos);
}

TEST_F(GatherPlanTest, MoreThanMemoryOrAddressesHoldIsFull) {
  // The second has more bytes than 64 bits count.
  for (const mlx::core::Shape& shape : {mlx::core::Shape{64, 0, 1 << 20}, mlx::core::Shape{1 << 30, 0, 1 << 30}}) {
    auto image = std::make_shared<Image>();
    layout::TensorInfo tensor;
    tensor.name = "keys";
    tensor.shape = shape;
    tensor.seq_axis = 1;
    image->header.tensors = {tensor};
    sources_ = {{image, nullptr}};
    GatherRequest request;
    request.keys = {testing::test_root()};
    request.capacity = std::numeric_limits<mlx::core::ShapeElem>::max();
    plan_ = {};
    const Status planned = make(request);
    EXPECT_EQ((planned.is_ok() ? plan_.allocate() : planned).code(), StatusCode::Full);
  }
}

}  // namespace
}  // namespace prefixcache::store
