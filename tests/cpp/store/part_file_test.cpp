#include "store/part_file.h"

#include <cerrno>

#include <gtest/gtest.h>

#include "hash/checksum.h"
#include "layout/block_file.h"
#include "support/blocks.h"
#include "support/faulty_env.h"
#include "support/temp_dir.h"

namespace prefixcache::store {
namespace {

using testing::Block;
using testing::FaultyEnv;
using testing::TempDir;

class PartFileTest : public ::testing::Test {
 protected:
  // A file as the store writes it, of `slots` tensors.
  void write(std::size_t slots = 2, int heads = 2) {
    header_.key = block_.key;
    header_.parent = block_.parent;
    header_.depth = block_.depth;
    header_.row_lo = block_.start();
    header_.row_hi = block_.depth;
    header_.tokens = block_.tokens;
    for (std::size_t i = 0; i < slots; ++i) {
      layout::TensorInfo tensor;
      tensor.name = std::to_string(i) + "/keys";
      tensor.dtype = mlx::core::float16;
      tensor.shape = {heads, 4, 3};
      tensor.seq_axis = 1;
      header_.tensors.push_back(tensor);
    }
    data_.resize(layout::place_tensors(header_.tensors));
    for (std::size_t i = 0; i < data_.size(); ++i) data_[i] = static_cast<std::uint8_t>(testing::mixed(i));
    const std::span<const std::uint8_t> all(data_);
    for (auto& tensor : header_.tensors) tensor.digest = hash::xxh3_64(all.subspan(tensor.offset, tensor.nbytes));
    const std::string encoded = layout::encode_header(header_);
    testing::write_file(path_, encoded + std::string(data_.begin(), data_.end()));
  }
  Status open() {
    std::unique_ptr<ReadableFile> file;
    if (Status status = env_.open(path_, file); !status.is_ok()) return status;
    return PartFile::open(std::move(file), path_, name_, file_);
  }

  const Block block_ = testing::chain(1, 4)[0];
  layout::NameInfo name_{block_.key, layout::parent_prefix(block_.parent), block_.depth, Part::kv};
  layout::PartHeader header_;
  std::vector<std::uint8_t> data_;
  FaultyEnv env_;
  TempDir dir_;
  const std::string path_ = dir_ / "part";
  std::shared_ptr<PartFile> file_;
};

TEST_F(PartFileTest, OpensAndMaps) {
  write();
  ASSERT_TRUE(open().is_ok());
  EXPECT_EQ(file_->header(), header_);
  EXPECT_EQ(file_->data_offset() + data_.size(), file_->mapping().size());
  const auto mapped = file_->mapping().subspan(file_->data_offset());
  EXPECT_TRUE(std::equal(data_.begin(), data_.end(), mapped.begin(), mapped.end()));
}

TEST_F(PartFileTest, ReadsWhereItCannotBeMapped) {
  env_.refuse_to_map = true;
  write();
  ASSERT_TRUE(open().is_ok());
  EXPECT_TRUE(file_->mapping().empty());
  std::vector<std::uint8_t> out(data_.size());
  ASSERT_TRUE(file_->read(file_->data_offset(), out).is_ok());
  EXPECT_EQ(out, data_);
}

TEST_F(PartFileTest, AHeaderLongerThanTheFirstReadIsReadWhole) {
  write(1000);
  ASSERT_TRUE(open().is_ok());
  EXPECT_GT(file_->data_offset(), 24u << 10);
  EXPECT_EQ(file_->header(), header_);
}

TEST_F(PartFileTest, EachTensorIsTouchedAndVerifiedOnItsOwn) {
  write();
  ASSERT_TRUE(open().is_ok());
  EXPECT_FALSE(file_->verified(0));
  file_->set_verified(0);
  EXPECT_TRUE(file_->verified(0));
  EXPECT_FALSE(file_->verified(1));
  EXPECT_TRUE(file_->first_touch(1));
  EXPECT_FALSE(file_->first_touch(1));
  EXPECT_TRUE(file_->first_touch(0));
}

TEST_F(PartFileTest, KnowsWhetherItNeedsTheDisk) {
  write(4, 50'000);
  ASSERT_TRUE(open().is_ok());
  EXPECT_TRUE(file_->in_memory());
  // What is mapped stays.
  file_.reset();
  if (!testing::drop_from_memory(path_)) GTEST_SKIP() << "this system drops no file from memory";
  ASSERT_TRUE(open().is_ok());
  if (file_->in_memory()) GTEST_SKIP() << "this file system keeps its files in memory";
  for (std::size_t i = 0; i < header_.tensors.size(); ++i) {
    const PartFile::InOrder in_order(*file_);
    const auto& tensor = file_->header().tensors[i];
    file_->bring_in(i);
    const auto mapped = file_->mapping().subspan(file_->data_offset() + tensor.offset, tensor.nbytes);
    ASSERT_EQ(hash::xxh3_64(mapped), tensor.digest) << i;
  }
  EXPECT_TRUE(file_->in_memory());
}

TEST_F(PartFileTest, TheNameMustTellTheTruth) {
  write();
  const layout::NameInfo good = name_;
  const auto refused = [&](const char* what) {
    EXPECT_EQ(open().code(), StatusCode::Corrupt) << what;
    EXPECT_EQ(file_, nullptr) << what;
    name_ = good;
  };
  name_.key = testing::test_root();
  refused("key");
  name_.parent_prefix ^= 1;
  refused("parent");
  ++name_.depth;
  refused("depth");
  name_.part = Part::win;
  refused("part");
}

TEST_F(PartFileTest, DamageOfTheHeaderOrTheSizeIsCorrupt) {
  write();
  const std::string good = testing::read_file(path_);
  const auto status_of = [&](const std::string& bytes) {
    testing::write_file(path_, bytes);
    return open();
  };
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{8}, std::size_t{100}, good.size() - 1}) {
    const Status status = status_of(good.substr(0, size));
    EXPECT_EQ(status.code(), StatusCode::Corrupt) << size << " bytes: " << status.message();
  }
  EXPECT_EQ(status_of(good + "x").code(), StatusCode::Corrupt);
  EXPECT_EQ(status_of("\x7f" + good.substr(1)).code(), StatusCode::Corrupt);
  const Status status = status_of("not at all such a file, but long enough to hold a length that makes no sense");
  EXPECT_EQ(status.code(), StatusCode::Corrupt);
  EXPECT_NE(status.message().find(path_), std::string::npos);
}

TEST_F(PartFileTest, FaultsAreToldApart) {
  EXPECT_EQ(open().code(), StatusCode::NotFound);
  write();
  env_.open_error = EMFILE;
  EXPECT_EQ(open().error_number(), EMFILE);
  env_.open_error = 0;
  env_.read_error = EIO;
  const Status status = open();
  EXPECT_EQ(status.code(), StatusCode::IOError);
  EXPECT_EQ(status.error_number(), EIO);
}

}  // namespace
}  // namespace prefixcache::store
