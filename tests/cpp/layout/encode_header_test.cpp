// Headers that were written: they come back, any safetensors reader understands them, and bad ones are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "layout/sample_headers.h"

namespace prefixcache::layout::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr unsigned kSeed = 20261;

TEST(EncodeHeader, ComesBackAsItWas) {
  const PartHeader header = small_header();
  const std::string file = encode_header(header);
  EXPECT_EQ(file.size() % 64, 0u);
  const Parsed parsed = parse(file, file.size() + data_bytes(header));
  ASSERT_TRUE(parsed.status.is_ok()) << parsed.status.message();
  EXPECT_EQ(parsed.header, header);
  EXPECT_EQ(parsed.data_offset, file.size());
}

TEST(EncodeHeader, RandomHeadersComeBack) {
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 random(kSeed);
  for (int round = 0; round < 2000; ++round) {
    const PartHeader header = random_header(random);
    const std::string file = encode_header(header);
    const Parsed parsed = parse(file, file.size() + data_bytes(header));
    ASSERT_TRUE(parsed.status.is_ok()) << "round " << round << ": " << parsed.status.message();
    ASSERT_EQ(parsed.header, header) << "round " << round;
    ASSERT_EQ(encode_header(parsed.header), file) << "round " << round;
  }
}

// What any other reader of safetensors sees.
TEST(EncodeHeader, IsJsonThatSaysTheSame) {
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 random(kSeed);
  for (int round = 0; round < 300; ++round) {
    const PartHeader header = random_header(random);
    const auto json = nlohmann::json::parse(encode_header(header).substr(8));
    ASSERT_EQ(json.size(), header.tensors.size() + 1);
    const auto& metadata = json.at("__metadata__");
    for (const auto& [name, value] : metadata.items()) ASSERT_TRUE(value.is_string()) << name;
    ASSERT_EQ(metadata.size(), 11u);
    ASSERT_EQ(metadata.at("format"), "prefixcache.v1");
    ASSERT_EQ(metadata.at("key"), header.key.hex());
    ASSERT_EQ(metadata.at("parent"), header.parent.hex());
    ASSERT_EQ(metadata.at("depth"), std::to_string(header.depth));
    ASSERT_EQ(metadata.at("part"), part_name(header.part));
    ASSERT_EQ(metadata.at("rows"), std::to_string(header.row_lo) + ":" + std::to_string(header.row_hi));
    ASSERT_EQ(metadata.at("meta"), header.meta);
    for (const auto& info : header.tensors) {
      const auto& entry = json.at(info.name);
      ASSERT_EQ(entry.at("dtype"), dtype_name(info.dtype));
      ASSERT_EQ(entry.at("shape").get<std::vector<int>>(), std::vector<int>(info.shape.begin(), info.shape.end()));
      ASSERT_EQ(entry.at("data_offsets"), nlohmann::json({info.offset, info.offset + info.nbytes}));
    }
  }
}

TEST(EncodeHeader, SizeDoesNotDependOnDigests) {
  PartHeader header = small_header();
  const auto size = encode_header(header).size();
  for (auto& info : header.tensors) info.digest = 0;
  EXPECT_EQ(encode_header(header).size(), size);
  for (auto& info : header.tensors) info.digest = ~std::uint64_t{0};
  EXPECT_EQ(encode_header(header).size(), size);
}

TEST(EncodeHeader, DifferentHeadersGiveDifferentBytes) {
  const PartHeader header = small_header();
  const std::string file = encode_header(header);
  auto differs = [&](auto edit) {
    PartHeader other = header;
    edit(other);
    place_tensors(other.tensors);
    EXPECT_NE(encode_header(other), file);
  };
  differs([](PartHeader& h) { h.key.bytes[31] ^= 1; });
  differs([](PartHeader& h) { h.parent.bytes[0] ^= 1; });
  differs([](PartHeader& h) { h.depth += 1; });
  differs([](PartHeader& h) { h.part = Part::kv; });
  differs([](PartHeader& h) { h.tokens = {0, 42, 9496729517u % 100}; });
  differs([](PartHeader& h) { h.content[0].end += 1; });
  differs([](PartHeader& h) { h.content.clear(); });
  differs([](PartHeader& h) { h.meta += ' '; });
  differs([](PartHeader& h) { h.tensors[0].digest ^= 1; });
  differs([](PartHeader& h) { h.tensors[0].dtype = mlx::core::int8; });
  differs([](PartHeader& h) { h.tensors[0].seq_axis = kNoSeqAxis; });
  differs([](PartHeader& h) { std::swap(h.tensors[0], h.tensors[1]); });
  // Names whose texts would be equal without their lengths.
  auto named = [&](std::string first, std::string second) {
    PartHeader other = header;
    other.tensors[0].name = std::move(first);
    other.tensors[3].name = std::move(second);
    return encode_header(other);
  };
  EXPECT_NE(named("a,", "b"), named("a", ",b"));
}

TEST(EncodeHeader, RefusesWhatItCouldNotReadBack) {
  auto refused = [](auto edit, const char* reason) {
    PartHeader header = small_header();
    edit(header);
    EXPECT_THAT([&] { encode_header(header); }, ThrowsMessage<std::invalid_argument>(HasSubstr(reason)));
  };
  refused([](PartHeader& h) { h.tokens.clear(); }, "0 tokens");
  refused([](PartHeader& h) { h.tokens.resize((1 << 20) + 1); }, "1048577 tokens");
  refused([](PartHeader& h) { h.depth = 2; }, "depth 2 is below the 3 tokens");
  refused([](PartHeader& h) { h.row_lo = -1; }, "rows [-1, 7)");
  refused([](PartHeader& h) { h.row_lo = 8; }, "rows [8, 7)");
  refused([](PartHeader& h) { h.row_hi = 8; }, "rows [5, 8)");
  refused([](PartHeader& h) { h.row_lo = 4; }, "2 rows along axis 0, expected those of [4, 7)");
  refused([](PartHeader& h) { h.part = static_cast<Part>(3); }, "part number 3");
  refused([](PartHeader& h) { h.content[0].start = 3; }, "content range [3, 900)");
  refused([](PartHeader& h) { h.content[0].start = 7; }, "content range [7, 900)");
  refused([](PartHeader& h) { h.content[0].end = 5; }, "content range [5, 5)");
  refused([](PartHeader& h) { h.meta = "\xff"; }, "meta is not UTF-8");
  refused([](PartHeader& h) { h.meta.assign((1 << 20) + 1, 'x'); }, "meta of 1048577 bytes");
  refused([](PartHeader& h) { h.tensors[1].name = h.tensors[0].name; }, "tensor name '0/codes' occurs twice");
  refused([](PartHeader& h) { h.tensors[0].name = "__metadata__"; }, "'__metadata__'");
  refused([](PartHeader& h) { h.tensors[0].name = std::string(257, 'x'); }, "256 bytes");
  refused([](PartHeader& h) { h.tensors[0].name = "\xed\xa0\x80"; }, "'\\xed\\xa0\\x80'");
  refused([](PartHeader& h) { h.tensors[0].seq_axis = 2; }, "sequence axis 2");
  refused([](PartHeader& h) { h.tensors[0].seq_axis = -2; }, "sequence axis -2");
  refused([](PartHeader& h) { h.tensors[0].dtype = mlx::core::complex64; }, "dtype");
  refused([](PartHeader& h) { h.tensors[0].shape[1] = -1; }, "length -1");
  refused([](PartHeader& h) { h.tensors[0].nbytes += 1; }, "7 bytes, expected 6");
  refused([](PartHeader& h) { h.tensors[0].offset += 1; }, "expected at 24");
}

TEST(PlaceTensors, PutsLargerItemsFirstWithoutHoles) {
  std::vector<TensorInfo> tensors = {
      tensor("u8", mlx::core::uint8, {3}),      tensor("f32", mlx::core::float32, {5}),
      tensor("bf16", mlx::core::bfloat16, {7}), tensor("none", mlx::core::float32, {0}),
      tensor("i64", mlx::core::int64, {}),      tensor("u32", mlx::core::uint32, {1, 1}),
      tensor("bool", mlx::core::bool_, {2, 2}),
  };
  EXPECT_EQ(place_tensors(tensors), 8u + 20 + 4 + 14 + 3 + 4);
  std::vector<std::pair<std::string, std::uint64_t>> placed;
  for (const auto& info : tensors) placed.emplace_back(info.name, info.offset);
  EXPECT_THAT(placed, ::testing::ElementsAre(std::pair("u8", 46u), std::pair("f32", 8u), std::pair("bf16", 32u),
                                             std::pair("none", 28u), std::pair("i64", 0u), std::pair("u32", 28u),
                                             std::pair("bool", 49u)));
}

TEST(PlaceTensors, RefusesSizesThatOverflow) {
  constexpr int kMost = std::numeric_limits<int>::max();
  auto refused = [](mlx::core::Shape shape, const char* reason) {
    std::vector<TensorInfo> tensors = {tensor("big", mlx::core::float32, std::move(shape))};
    EXPECT_THAT([&] { place_tensors(tensors); }, ThrowsMessage<std::invalid_argument>(HasSubstr(reason)));
  };
  refused({kMost, kMost, kMost}, "more than 2^63 bytes");
  refused({0, kMost, kMost, kMost}, "more than 2^63 bytes");
  refused({1, -1}, "length -1");
  refused(mlx::core::Shape(17, 1), "17 axes");
  std::vector<TensorInfo> sum(5, tensor("big", mlx::core::uint8, {kMost, kMost}));
  for (auto& info : sum) info.shape.push_back(2);
  EXPECT_THROW(place_tensors(sum), std::invalid_argument);
}

}  // namespace
}  // namespace prefixcache::layout::testing
