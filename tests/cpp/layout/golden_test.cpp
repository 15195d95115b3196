// Files of the first version, which every later version must read. tests/golden/README.md says how they were made.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

#include "layout/sample_headers.h"

namespace prefixcache::layout::testing {
namespace {

// Tensor data that a person can check: byte i of the tensor at place p is 16 p + i, of booleans i mod 2.
std::string pattern(std::size_t place, const TensorInfo& info) {
  std::string data;
  for (std::size_t i = 0; i < info.nbytes; ++i) {
    data += static_cast<char>(info.dtype == mlx::core::bool_ ? i % 2 : 16 * place + i);
  }
  return data;
}

PartHeader golden_header() {
  PartHeader header;
  for (int i = 0; i < 32; ++i) {
    header.key.bytes[i] = static_cast<std::uint8_t>(i);
    header.parent.bytes[i] = static_cast<std::uint8_t>(0xf0 + i);
  }
  header.depth = 8;
  header.part = Part::kv;
  header.row_lo = 4;
  header.row_hi = 8;
  header.tokens = {1, 49151, 0, 4294967295u};
  header.content = {{5, 9, header.parent}, {7, 8, header.key}};
  header.meta = "{\"caches\": [\"caf\xc3\xa9\", \"tab\there\"]}";
  header.tensors = {
      tensor("0/keys.codes", mlx::core::uint8, {1, 4, 3}, 1),
      tensor("0/keys", mlx::core::bfloat16, {1, 2, 4, 2}, 2),
      tensor("0/values", mlx::core::float16, {4, 1}, 0),
      tensor("scales", mlx::core::float32, {2}),
      tensor("count", mlx::core::int64, {}),
      tensor("flags", mlx::core::bool_, {3}),
      tensor("empty", mlx::core::uint32, {2, 0}),
      tensor("a \"quoted\"\\name:1,\xe2\x82\xac\n", mlx::core::int16, {1}),
  };
  place_tensors(header.tensors);
  for (std::size_t place = 0; place < header.tensors.size(); ++place) {
    header.tensors[place].digest = hash::xxh3_64(bytes_of(pattern(place, header.tensors[place])));
  }
  return header;
}

std::string golden_file() {
  const PartHeader header = golden_header();
  std::string data(data_bytes(header), '\0');
  for (std::size_t place = 0; place < header.tensors.size(); ++place) {
    const auto& info = header.tensors[place];
    data.replace(info.offset, info.nbytes, pattern(place, info));
  }
  return encode_header(header) + data;
}

std::string read_golden(const std::string& name) {
  std::ifstream file(std::string(PREFIXCACHE_GOLDEN_DIR) + "/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Written out, not computed: what v1_kv.safetensors says.
TEST(Golden, V1KvReadsAsItAlwaysDid) {
  const std::string file = read_golden("v1_kv.safetensors");
  ASSERT_EQ(file.size(), 1417u);
  EXPECT_EQ(hash::xxh3_64(bytes_of(file)), 0x68261c0e5f9ce3c4u);
  const Parsed parsed = parse(file, file.size());
  ASSERT_TRUE(parsed.status.is_ok()) << parsed.status.message();
  const PartHeader& header = parsed.header;
  EXPECT_EQ(parsed.data_offset, 1344u);
  EXPECT_EQ(header.key.hex(), "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f");
  EXPECT_EQ(header.parent.hex(), "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff000102030405060708090a0b0c0d0e0f");
  EXPECT_EQ(header.depth, 8);
  EXPECT_EQ(header.part, Part::kv);
  EXPECT_EQ(header.row_lo, 4);
  EXPECT_EQ(header.row_hi, 8);
  EXPECT_EQ(header.tokens, (std::vector<std::uint32_t>{1, 49151, 0, 4294967295u}));
  EXPECT_EQ(header.content, (std::vector<ContentKey>{{5, 9, header.parent}, {7, 8, header.key}}));
  EXPECT_EQ(header.meta, "{\"caches\": [\"caf\xc3\xa9\", \"tab\there\"]}");

  struct Expected {
    std::string name;
    std::string dtype;
    mlx::core::Shape shape;
    int seq_axis;
    std::uint64_t offset;
    std::uint64_t digest;
  };
  const std::vector<Expected> expected = {
      {"0/keys.codes", "U8", {1, 4, 3}, 1, 58, 0x5ace6a511c10894b},
      {"0/keys", "BF16", {1, 2, 4, 2}, 2, 16, 0x4c005edf48e90b80},
      {"0/values", "F16", {4, 1}, 0, 48, 0xe5d40a4a17dde58a},
      {"scales", "F32", {2}, -1, 8, 0x1808e40d6723f646},
      {"count", "I64", {}, -1, 0, 0x0c88f66076c251c5},
      {"flags", "BOOL", {3}, -1, 70, 0x6b9b25aeeffe0439},
      {"empty", "U32", {2, 0}, -1, 16, 0x2d06800538d394c2},
      {"a \"quoted\"\\name:1,\xe2\x82\xac\n", "I16", {1}, -1, 56, 0x140350d7644de202},
  };
  ASSERT_EQ(header.tensors.size(), expected.size());
  for (std::size_t place = 0; place < expected.size(); ++place) {
    const auto& info = header.tensors[place];
    EXPECT_EQ(info.name, expected[place].name);
    EXPECT_EQ(dtype_name(info.dtype), expected[place].dtype) << info.name;
    EXPECT_EQ(info.shape, expected[place].shape) << info.name;
    EXPECT_EQ(info.seq_axis, expected[place].seq_axis) << info.name;
    EXPECT_EQ(info.offset, expected[place].offset) << info.name;
    EXPECT_EQ(info.digest, expected[place].digest) << info.name;
    const auto data = file.substr(parsed.data_offset + info.offset, info.nbytes);
    EXPECT_EQ(data, pattern(place, info)) << info.name;
    EXPECT_EQ(hash::xxh3_64(bytes_of(data)), info.digest) << info.name;
  }
}

TEST(Golden, V1KvIsWhatIsWrittenToday) {
  EXPECT_EQ(read_golden("v1_kv.safetensors"), golden_file());
}

void write(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  ASSERT_TRUE(file.good()) << path;
}

// Not a test: makes the files, in the directory that PREFIXCACHE_MAKE_FILES names.
TEST(Golden, DISABLED_MakeFiles) {
  const char* directory = std::getenv("PREFIXCACHE_MAKE_FILES");
  ASSERT_NE(directory, nullptr);
  write(directory + std::string("/v1_kv.safetensors"), golden_file());

  // Seeds of tests/fuzz: four bytes of data size, then the file's first bytes.
  auto seed = [&](const std::string& name, const PartHeader& header) {
    std::string bytes;
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>(data_bytes(header) >> (8 * i));
    write(directory + std::string("/") + name, bytes + encode_header(header));
  };
  PartHeader least;
  least.depth = 1;
  least.tokens = {0};
  seed("least", least);
  seed("golden", golden_header());
  seed("small", small_header());
  PartHeader many = least;
  for (int i = 0; i < 8; ++i) many.tensors.push_back(tensor(std::to_string(i), mlx::core::float16, {i, 1}));
  place_tensors(many.tensors);
  seed("many", many);
}

}  // namespace
}  // namespace prefixcache::layout::testing
