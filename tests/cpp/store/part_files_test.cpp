#include "prefixcache/part_files.h"

#include <cerrno>
#include <filesystem>
#include <map>

#include <gtest/gtest.h>

#include "hash/checksum.h"
#include "layout/block_file.h"
#include "support/blocks.h"
#include "support/faulty_env.h"
#include "support/temp_dir.h"

namespace prefixcache {
namespace {

namespace fs = std::filesystem;
using testing::Block;
using testing::FaultyEnv;
using testing::TempDir;

// More than one piece of what is read at a time.
constexpr int kRows = 3000;

class PartFilesTest : public ::testing::Test {
 protected:
  PartFilesTest() {
    layout::PartHeader header;
    header.key = block_.key;
    header.parent = block_.parent;
    header.depth = block_.depth;
    header.row_lo = 0;
    header.row_hi = block_.depth;
    header.tokens = block_.tokens;
    for (const char* name : {"0/keys", "0/values"}) {
      layout::TensorInfo tensor;
      tensor.name = name;
      tensor.dtype = mlx::core::float32;
      tensor.shape = {kRows, 4, 32};
      tensor.seq_axis = 1;
      header.tensors.push_back(tensor);
    }
    std::vector<std::uint8_t> data(layout::place_tensors(header.tensors));
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::uint8_t>(testing::mixed(i));
    const std::span<const std::uint8_t> all(data);
    for (auto& tensor : header.tensors) tensor.digest = hash::xxh3_64(all.subspan(tensor.offset, tensor.nbytes));
    text_ = layout::encode_header(header);
    data_offset_ = text_.size();
    text_.append(data.begin(), data.end());
    testing::write_file(path_, text_);
  }
  StatusCode check(bool data = true) {
    summary_ = {};
    return check_part(env_, path_, data, summary_).code();
  }
  void flip(std::size_t position) {
    text_[position] = static_cast<char>(text_[position] ^ 4);
    testing::write_file(path_, text_);
  }

  const Block block_ = testing::chain(1, 4)[0];
  TempDir dir_;
  FaultyEnv env_;
  const std::string path_ = dir_ / layout::file_name(block_.key, block_.parent, block_.depth, Part::kv);
  std::string text_;
  std::size_t data_offset_ = 0;
  PartSummary summary_;
};

TEST_F(PartFilesTest, ASoundFileIsSummed) {
  ASSERT_EQ(check(), StatusCode::Ok);
  EXPECT_EQ(summary_.row_lo, 0);
  EXPECT_EQ(summary_.row_hi, 4);
  EXPECT_EQ(summary_.tokens, 4u);
  EXPECT_EQ(summary_.tensors, 2u);
  EXPECT_EQ(summary_.tensor_bytes, 2u * kRows * 4 * 32 * 4);
}

TEST_F(PartFilesTest, DamagedDataIsFoundWhereDataAreRead) {
  for (const std::size_t position : {data_offset_, data_offset_ + (1 << 20), text_.size() - 1}) {
    flip(position);
    EXPECT_EQ(check(), StatusCode::Corrupt) << position;
    EXPECT_EQ(summary_.tokens, 4u);
    EXPECT_EQ(check(false), StatusCode::Ok);
    flip(position);
    EXPECT_EQ(check(), StatusCode::Ok);
  }
}

TEST_F(PartFilesTest, AFileCutWhileItIsCheckedIsNoCrash) {
  env_.after_map = [](const std::string& path) { fs::resize_file(path, 4096); };
  EXPECT_EQ(check(), StatusCode::IOError);
  env_.after_map = nullptr;
  EXPECT_EQ(check(), StatusCode::Corrupt);
}

TEST_F(PartFilesTest, ADamagedHeaderSaysNothing) {
  flip(100);
  EXPECT_EQ(check(false), StatusCode::Corrupt);
  EXPECT_EQ(summary_.tokens, 0u);
  EXPECT_TRUE(fs::exists(path_));
}

TEST_F(PartFilesTest, AnotherNameOrNoFile) {
  const Block other = testing::chain(1, 4, 9)[0];
  const std::string moved = dir_ / layout::file_name(other.key, other.parent, other.depth, Part::kv);
  fs::rename(path_, moved);
  EXPECT_EQ(check(), StatusCode::NotFound);
  EXPECT_EQ(check_part(env_, moved, true, summary_).code(), StatusCode::Corrupt);
  EXPECT_EQ(check_part(env_, dir_ / "notes.txt", true, summary_).code(), StatusCode::Corrupt);
  fs::create_symlink(moved, path_);
  EXPECT_EQ(check(), StatusCode::IOError);
}

TEST_F(PartFilesTest, NamesThatAStoreDoesNotGive) {
  PartName name;
  ASSERT_TRUE(parse_part_name(fs::path(path_).filename().string(), name));
  EXPECT_EQ(name.key, block_.key);
  EXPECT_EQ(name.parent_prefix, layout::parent_prefix(block_.parent));
  EXPECT_EQ(name.depth, 4);
  EXPECT_EQ(name.part, Part::kv);
  EXPECT_FALSE(parse_part_name(path_, name));
  EXPECT_FALSE(parse_part_name("", name));
}

TEST(EvictionOrder, DeepestOfTheOldestChainFirstAndWindowsByTheirOwnAge) {
  std::vector<PartAge> parts;
  const auto add = [&](const Block& block, Part part, double modified) {
    parts.push_back({{block.key, layout::parent_prefix(block.parent), block.depth, part}, modified});
  };
  const auto old_chain = testing::chain(2, 4, 1);
  const auto new_chain = testing::chain(2, 4, 2);
  add(new_chain[0], Part::kv, 1);  // as new as the block behind it
  add(new_chain[1], Part::kv, 9);
  add(old_chain[0], Part::kv, 5);
  add(old_chain[1], Part::kv, 4);
  add(old_chain[1], Part::win, 3);
  add(old_chain[0], Part::state, 7);
  EXPECT_EQ(eviction_order(parts), (std::vector<std::size_t>{4, 3, 2, 5, 1, 0}));
  EXPECT_EQ(parts[0].modified, 9);
  EXPECT_EQ(parts[2].modified, 5);
  EXPECT_EQ(parts[4].modified, 3);
}

}  // namespace
}  // namespace prefixcache
