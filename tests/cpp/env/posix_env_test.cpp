#include "prefixcache/env.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gather/fault_guard.h"
#include "support/temp_dir.h"

namespace prefixcache {
namespace {

namespace fs = std::filesystem;
using testing::read_file;
using testing::TempDir;
using testing::write_file;

std::span<const std::uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

class PosixEnv : public ::testing::Test {
 protected:
  Env& env_ = Env::posix();
  TempDir dir_;
};

TEST_F(PosixEnv, WritesPiecesInOrderForThisUserOnly) {
  const std::string a = "first ", b, c = "second";
  const std::span<const std::uint8_t> pieces[] = {bytes_of(a), bytes_of(b), bytes_of(c)};
  ASSERT_TRUE(env_.write_new(dir_ / "file", pieces).is_ok());
  EXPECT_EQ(read_file(dir_ / "file"), "first second");
  struct stat st;
  ASSERT_EQ(::stat((dir_ / "file").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0600u);
}

TEST_F(PosixEnv, DoesNotWriteOverAFile) {
  write_file(dir_ / "file", "old");
  const std::string text = "new";
  const std::span<const std::uint8_t> pieces[] = {bytes_of(text)};
  const Status status = env_.write_new(dir_ / "file", pieces);
  EXPECT_EQ(status.code(), StatusCode::IOError);
  EXPECT_EQ(status.error_number(), EEXIST);
  EXPECT_EQ(read_file(dir_ / "file"), "old");
}

TEST_F(PosixEnv, AFailedWriteLeavesNothing) {
  const std::string text = "some";
  const std::span<const std::uint8_t> pieces[] = {bytes_of(text)};
  const Status status = env_.write_new("/dev/full/x", pieces);
  EXPECT_EQ(status.code(), StatusCode::NotFound);
  EXPECT_EQ(status.error_number(), ENOTDIR);
  EXPECT_EQ(env_.write_new(dir_ / "missing/file", pieces).code(), StatusCode::NotFound);
  EXPECT_TRUE(dir_.files().empty());
}

TEST_F(PosixEnv, ReadsRangesBeforeAndAfterMapping) {
  write_file(dir_ / "file", "0123456789");
  std::unique_ptr<ReadableFile> file;
  ASSERT_TRUE(env_.open(dir_ / "file", file).is_ok());
  EXPECT_EQ(file->info().size, 10u);
  EXPECT_TRUE(file->info().is_regular);
  for (const bool mapped : {false, true}) {
    if (mapped) {
      const auto mapping = file->map();
      ASSERT_EQ(mapping.size(), 10u);
      EXPECT_EQ(std::string(mapping.begin(), mapping.end()), "0123456789");
      EXPECT_EQ(file->map().data(), mapping.data());
    }
    std::vector<std::uint8_t> out(4);
    ASSERT_TRUE(file->read(3, out).is_ok());
    EXPECT_EQ(std::string(out.begin(), out.end()), "3456");
    EXPECT_EQ(file->read(8, out).code(), StatusCode::IOError);
    EXPECT_EQ(file->read(~std::uint64_t{0} - 1, out).code(), StatusCode::IOError);
    EXPECT_TRUE(file->read(10, {}).is_ok());
  }
}

TEST_F(PosixEnv, AMappingOutlivesTheName) {
  write_file(dir_ / "file", "kept");
  std::unique_ptr<ReadableFile> file;
  ASSERT_TRUE(env_.open(dir_ / "file", file).is_ok());
  const auto mapping = file->map();
  ASSERT_TRUE(env_.remove(dir_ / "file").is_ok());
  EXPECT_EQ(std::string(mapping.begin(), mapping.end()), "kept");
}

TEST_F(PosixEnv, AReadOfAMappedFileThatShrankIsAnError) {
  write_file(dir_ / "file", std::string(1 << 16, 'x'));
  std::unique_ptr<ReadableFile> file;
  ASSERT_TRUE(env_.open(dir_ / "file", file).is_ok());
  ASSERT_FALSE(file->map().empty());
  fs::resize_file(dir_ / "file", 0);
  std::vector<std::uint8_t> out(100);
  EXPECT_EQ(file->read(1 << 15, out).code(), StatusCode::IOError);
}

TEST_F(PosixEnv, AnEmptyFileHasAnEmptyMapping) {
  write_file(dir_ / "file", "");
  std::unique_ptr<ReadableFile> file;
  ASSERT_TRUE(env_.open(dir_ / "file", file).is_ok());
  EXPECT_TRUE(file->map().empty());
}

TEST_F(PosixEnv, OpensRegularFilesOnly) {
  write_file(dir_ / "file", "x");
  fs::create_symlink(dir_ / "file", dir_ / "link");
  ASSERT_EQ(::mkfifo((dir_ / "pipe").c_str(), 0600), 0);
  std::unique_ptr<ReadableFile> file;
  EXPECT_EQ(env_.open(dir_ / "absent", file).code(), StatusCode::NotFound);
  EXPECT_EQ(env_.open(dir_ / "link", file).code(), StatusCode::IOError);
  EXPECT_EQ(env_.open(dir_ / "pipe", file).code(), StatusCode::IOError);  // and does not wait for a writer
  EXPECT_EQ(env_.open(dir_.path(), file).code(), StatusCode::IOError);
  EXPECT_EQ(file, nullptr);
}

TEST_F(PosixEnv, StatAndListDoNotFollowLinks) {
  write_file(dir_ / "file", "abc");
  fs::create_symlink("/", dir_ / "link");
  fs::create_directory(dir_ / "folder");
  FileInfo info;
  ASSERT_TRUE(env_.stat(dir_ / "link", info).is_ok());
  EXPECT_FALSE(info.is_directory);
  std::vector<DirEntry> entries;
  ASSERT_TRUE(env_.list(dir_.path(), entries).is_ok());
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].name, "file");
  EXPECT_EQ(entries[0].info.size, 3u);
  EXPECT_NEAR(entries[0].info.modified, env_.now(), 60);
  EXPECT_TRUE(entries[1].info.is_directory);
  EXPECT_FALSE(entries[2].info.is_directory || entries[2].info.is_regular);
  EXPECT_EQ(env_.list(dir_ / "absent", entries).code(), StatusCode::NotFound);
}

TEST_F(PosixEnv, RenameReplacesAndRemoveSaysWhatIsMissing) {
  write_file(dir_ / "a", "new");
  write_file(dir_ / "b", "old");
  ASSERT_TRUE(env_.rename(dir_ / "a", dir_ / "b").is_ok());
  EXPECT_EQ(read_file(dir_ / "b"), "new");
  EXPECT_EQ(env_.rename(dir_ / "a", dir_ / "b").code(), StatusCode::NotFound);
  ASSERT_TRUE(env_.remove(dir_ / "b").is_ok());
  EXPECT_EQ(env_.remove(dir_ / "b").code(), StatusCode::NotFound);
}

TEST_F(PosixEnv, MakesPrivateDirectoriesWithParents) {
  ASSERT_TRUE(env_.make_directories(dir_ / "a/b/c").is_ok());
  ASSERT_TRUE(env_.make_directories(dir_ / "a/b/c").is_ok());
  for (const char* path : {"a", "a/b", "a/b/c"}) {
    EXPECT_TRUE(env_.check_private(dir_ / path).is_ok()) << path;
    EXPECT_EQ(fs::status(dir_ / path).permissions(), fs::perms::owner_all) << path;
  }
  write_file(dir_ / "file", "x");
  EXPECT_EQ(env_.make_directories(dir_ / "file").error_number(), ENOTDIR);
  EXPECT_EQ(env_.make_directories(dir_ / "file/below").error_number(), ENOTDIR);
}

TEST_F(PosixEnv, PrivateMeansThatNobodyElseMayWrite) {
  for (const auto open : {fs::perms::group_write, fs::perms::others_write}) {
    fs::permissions(dir_.path(), fs::perms::owner_all | open);
    const Status status = env_.check_private(dir_.path());
    EXPECT_EQ(status.error_number(), EPERM);
    EXPECT_NE(status.message().find(dir_.path().string()), std::string::npos);
  }
  fs::permissions(dir_.path(), fs::perms::owner_all | fs::perms::group_read | fs::perms::others_read);
  EXPECT_TRUE(env_.check_private(dir_.path()).is_ok());
  EXPECT_EQ(env_.check_private(dir_ / "absent").code(), StatusCode::NotFound);
}

TEST_F(PosixEnv, PrivateMeansThatItIsOurs) {
  if (::geteuid() != 0) {
    EXPECT_EQ(env_.check_private("/").error_number(), EPERM);
    return;
  }
  ASSERT_EQ(::chown(dir_.path().c_str(), 12345, 12345), 0);
  const Status status = env_.check_private(dir_.path());
  EXPECT_EQ(status.error_number(), EPERM);
  EXPECT_NE(status.message().find("12345"), std::string::npos);
}

}  // namespace
}  // namespace prefixcache
