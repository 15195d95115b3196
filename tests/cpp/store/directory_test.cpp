#include "store/directory.h"

#include <cerrno>
#include <filesystem>

#include <gtest/gtest.h>

#include "support/blocks.h"
#include "support/faulty_env.h"
#include "support/temp_dir.h"

namespace prefixcache::store {
namespace {

namespace fs = std::filesystem;
using testing::Block;
using testing::chain;
using testing::FaultyEnv;
using testing::TempDir;
using testing::write_file;

layout::NameInfo name_of(const Block& block) {
  return {block.key, layout::parent_prefix(block.parent), block.depth, Part::kv};
}

class DirectoryTest : public ::testing::Test {
 protected:
  Status write(Directory& directory, const Block& block, std::size_t size) {
    const std::vector<std::uint8_t> a(size / 2, 1), b(size - size / 2, 2);
    const std::span<const std::uint8_t> pieces[] = {a, b};
    std::string temp;
    bool granted = false;
    Status status = directory.reserve(size, 1 << 20, granted);
    if (status.code() == StatusCode::NotFound) {
      scan(directory);
      status = directory.reserve(size, 1 << 20, granted);
    }
    if (!status.is_ok()) return status;
    status = directory.write(name_of(block), pieces, temp);
    if (status.is_ok()) return directory.publish(temp, name_of(block), size);
    directory.release(size);
    return status;
  }
  static std::vector<FoundPart> scan(Directory& directory) {
    std::vector<FoundPart> parts;
    if (directory.scan(parts).code() == StatusCode::NotFound) {
      EXPECT_TRUE(directory.prepare().is_ok());
      EXPECT_TRUE(directory.scan(parts).is_ok());
    }
    return parts;
  }
  Directory open(const std::string& name_space = "ns") { return {env_, dir_ / "root", name_space, 600}; }

  FaultyEnv env_;
  TempDir dir_;
};

TEST_F(DirectoryTest, WritesUnderItsOwnNameAndCounts) {
  auto directory = open();
  ASSERT_TRUE(directory.prepare().is_ok());
  const auto blocks = chain(2, 4);
  ASSERT_TRUE(write(directory, blocks[0], 1000).is_ok());
  ASSERT_TRUE(write(directory, blocks[1], 500).is_ok());
  EXPECT_EQ(directory.used(), 1500u);
  const std::string path = directory.path_of(name_of(blocks[0]));
  const std::string folder = dir_ / "root/v1/ns/" + blocks[0].key.hex().substr(0, 2) + "/";
  EXPECT_EQ(path, folder + layout::file_name(name_of(blocks[0])));
  EXPECT_EQ(fs::file_size(path), 1000u);
  EXPECT_EQ(dir_.files().size(), 2u);
  ASSERT_TRUE(directory.remove(name_of(blocks[0]), 1000).is_ok());
  EXPECT_FALSE(fs::exists(path));
  EXPECT_EQ(directory.used(), 500u);
  EXPECT_TRUE(directory.remove(name_of(blocks[0]), 1000).is_ok());
}

TEST_F(DirectoryTest, AFailedWriteLeavesNothing) {
  auto directory = open();
  ASSERT_TRUE(directory.prepare().is_ok());
  const auto blocks = chain(1, 4);
  env_.write_error = ENOSPC;
  EXPECT_EQ(write(directory, blocks[0], 100).error_number(), ENOSPC);
  env_.write_error = 0;
  env_.rename_error = EIO;
  EXPECT_EQ(write(directory, blocks[0], 100).error_number(), EIO);
  EXPECT_TRUE(dir_.files().empty());
  EXPECT_EQ(directory.used(), 0u);
}

TEST_F(DirectoryTest, MakesTheTreeAgainWhenItWasRemoved) {
  auto directory = open();
  ASSERT_TRUE(directory.prepare().is_ok());
  fs::remove_all(dir_ / "root");
  EXPECT_TRUE(write(directory, chain(1, 4)[0], 100).is_ok());
  EXPECT_EQ(dir_.files().size(), 1u);
}

TEST_F(DirectoryTest, ScanFindsPartsByNameAloneAndCountsTheRest) {
  const auto blocks = chain(2, 4);
  {
    auto directory = open();
    ASSERT_TRUE(directory.prepare().is_ok());
    ASSERT_TRUE(write(directory, blocks[0], 100).is_ok());
    ASSERT_TRUE(write(directory, blocks[1], 200).is_ok());
    auto other = open("other");
    ASSERT_TRUE(other.prepare().is_ok());
    ASSERT_TRUE(write(other, blocks[0], 1000).is_ok());
  }
  auto directory = open();
  // In the wrong folder, or of a name that is none: not ours to serve, but counted.
  const fs::path folder = fs::path(directory.path_of(name_of(blocks[0]))).parent_path();
  const fs::path wrong = dir_.path() / "root/v1/ns/zz";
  fs::create_directories(wrong);
  fs::copy_file(directory.path_of(name_of(blocks[1])), wrong / layout::file_name(name_of(blocks[1])));
  write_file(folder / "notes.txt", "12345");
  fs::create_symlink(directory.path_of(name_of(blocks[1])), folder / layout::file_name(name_of(chain(1, 4, 9)[0])));

  ASSERT_TRUE(directory.prepare().is_ok());
  const auto found = scan(directory);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].bytes + found[1].bytes, 300u);
  EXPECT_EQ(env_.opens, 0);
  EXPECT_EQ(directory.used(), 100u + 200 + 1000 + 200 + 5);
}

TEST_F(DirectoryTest, EvictsTheOldestChainOfOthersFirstAndDeepestFirst) {
  auto other = open("other");
  ASSERT_TRUE(other.prepare().is_ok());
  // The newer chain's first block was written long ago, as first blocks are.
  std::vector<Block> blocks = chain(1, 4, 7);
  for (const auto& block : chain(3, 4)) blocks.push_back(block);
  const int hours[] = {2, 9, 3, 1};
  const auto now = fs::file_time_type::clock::now();
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    ASSERT_TRUE(write(other, blocks[i], 100).is_ok());
    fs::last_write_time(other.path_of(name_of(blocks[i])), now - std::chrono::hours(hours[i]));
  }
  auto directory = open();
  ASSERT_TRUE(directory.prepare().is_ok());
  EXPECT_TRUE(scan(directory).empty());
  for (const std::size_t next : {0u, 3u, 2u, 1u}) {
    ASSERT_TRUE(fs::exists(other.path_of(name_of(blocks[next]))));
    EXPECT_TRUE(directory.evict_foreign(1e18));
    EXPECT_FALSE(fs::exists(other.path_of(name_of(blocks[next])))) << next;
  }
  EXPECT_FALSE(directory.evict_foreign(1e18));
  EXPECT_EQ(directory.used(), 0u);
}

TEST_F(DirectoryTest, RemovesTemporaryFilesThatAreOldEnough) {
  auto directory = open();
  ASSERT_TRUE(directory.prepare().is_ok());
  fs::create_directories(dir_ / "root/v1/ns/ab");
  // The other way round: they were written while the clock was wrong.
  for (const int sign : {1, -1}) {
    write_file(dir_ / "root/v1/ns/ab/.tmp-1-1", "abandoned");
    write_file(dir_ / "root/v1/ns/.tmp-1-2", "p");
    env_.clock_offset = 0;
    EXPECT_TRUE(scan(directory).empty());
    EXPECT_EQ(directory.used(), 10u);
    env_.clock_offset = sign * 590;
    auto young = open();
    scan(young);
    EXPECT_EQ(dir_.files().size(), 2u);
    env_.clock_offset = sign * 610;
    auto later = open();
    scan(later);
    EXPECT_TRUE(dir_.files().empty());
    EXPECT_EQ(later.used(), 0u);
  }
}

TEST_F(DirectoryTest, PrepareChecksEveryLevel) {
  ASSERT_TRUE(open().prepare().is_ok());
  for (const char* level : {"root", "root/v1", "root/v1/ns"}) {
    fs::permissions(dir_ / level, fs::perms::all);
    EXPECT_EQ(open().prepare().error_number(), EPERM) << level;
    fs::permissions(dir_ / level, fs::perms::owner_all);
  }
  EXPECT_TRUE(open().prepare().is_ok());
}

// Folders that became links, to a place where files lie as a store lays them.
class LinkedDirectory : public DirectoryTest {
 protected:
  static constexpr const char* kLevels[] = {"root/v1", "root/v1/other", ""};

  // Moves the folder away and puts a link in its place. Where the folder is now.
  fs::path replace_by_link(const std::string& level) {
    const fs::path from = level.empty() ? fs::path(path_).parent_path() : fs::path(dir_ / level);
    const fs::path away = dir_ / "away";
    fs::rename(from, away);
    fs::create_directory_symlink(away, from);
    return away;
  }
  std::uint64_t files_behind(const fs::path& away) {
    std::uint64_t count = 0;
    for (const auto& item : fs::recursive_directory_iterator(away)) {
      const std::string name = item.path().filename();
      count += item.is_regular_file() && name != ".usage" ? 1 : 0;
    }
    return count;
  }
  // A part of another namespace and an old temporary file beside it.
  void prepare() {
    fs::remove_all(dir_ / "root");
    fs::remove_all(dir_ / "away");
    auto other = open("other");
    ASSERT_TRUE(other.prepare().is_ok());
    ASSERT_TRUE(write(other, block_, 100).is_ok());
    path_ = other.path_of(name_of(block_));
    write_file(fs::path(path_).parent_path() / ".tmp-1-1", "abandoned");
  }

  const Block block_ = chain(1, 4)[0];
  std::string path_;
};

TEST_F(LinkedDirectory, IsNeitherCountedNorEvictedFrom) {
  for (const std::string level : kLevels) {
    prepare();
    const fs::path away = replace_by_link(level);
    env_.clock_offset = 3600;
    auto directory = open();
    std::vector<FoundPart> parts;
    const Status prepared = directory.prepare();
    EXPECT_EQ(prepared.is_ok(), level != "root/v1") << prepared.message();
    EXPECT_EQ(directory.scan(parts).is_ok(), level != "root/v1");
    EXPECT_TRUE(parts.empty());
    EXPECT_EQ(directory.used(), 0u) << level;
    EXPECT_FALSE(directory.evict_foreign(1e18));
    EXPECT_EQ(files_behind(away), 2u) << level;
    env_.clock_offset = 0;
  }
}

TEST_F(LinkedDirectory, ThatWasAFolderWhenItWasCountedIsNotEvictedFrom) {
  for (const std::string level : kLevels) {
    prepare();
    auto directory = open();
    ASSERT_TRUE(directory.prepare().is_ok());
    EXPECT_TRUE(scan(directory).empty());
    EXPECT_EQ(directory.used(), 109u);
    const fs::path away = replace_by_link(level);
    EXPECT_FALSE(directory.evict_foreign(1e18)) << level;
    EXPECT_EQ(files_behind(away), 2u) << level;
  }
}

TEST_F(LinkedDirectory, OfThisNamespaceIsNotListedDatedOrRemovedFrom) {
  for (const std::string level : kLevels) {
    prepare();
    auto directory = open("other");
    ASSERT_TRUE(directory.prepare().is_ok());
    EXPECT_EQ(scan(directory).size(), 1u);
    const auto before = fs::last_write_time(path_);
    const fs::path away = replace_by_link(level);
    std::vector<FoundPart> parts;
    directory.look(parts);
    EXPECT_TRUE(parts.empty()) << level;
    EXPECT_FALSE(directory.date(name_of(block_), 1000).is_ok());
    EXPECT_FALSE(directory.remove(name_of(block_), 100).is_ok());
    EXPECT_EQ(fs::last_write_time(path_), before);
    EXPECT_EQ(files_behind(away), 2u) << level;
  }
}

}  // namespace
}  // namespace prefixcache::store
