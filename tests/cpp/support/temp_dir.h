// temp_dir.h: a folder that a test may fill, and what tests do to the files in it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

namespace prefixcache::testing {

class TempDir {
 public:
  TempDir() {
    std::string pattern = std::filesystem::temp_directory_path() / "prefixcache-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary directory");
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ / name; }

  // Every regular file below, sorted by name, but for the one in which stores count their bytes.
  std::vector<std::filesystem::path> files(const std::string& extension = "") const {
    std::vector<std::filesystem::path> found;
    for (const auto& item : std::filesystem::recursive_directory_iterator(path_)) {
      if (item.is_regular_file() && item.path().filename() != ".usage" &&
          (extension.empty() || item.path().extension() == extension)) {
        found.push_back(item.path());
      }
    }
    std::sort(found.begin(), found.end());
    return found;
  }
  std::vector<std::filesystem::path> parts() const { return files(".safetensors"); }
  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const auto& file : files()) sum += std::filesystem::file_size(file);
    return sum;
  }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void flip_bit(const std::filesystem::path& path, std::uint64_t byte, int bit = 0) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(static_cast<std::streamoff>(byte));
  const int before = file.get();
  file.seekp(static_cast<std::streamoff>(byte));
  file.put(static_cast<char>(before ^ (1 << bit)));
}

// Leaves a file's bytes to the disk. False where the system does not do so.
inline bool drop_from_memory(const std::filesystem::path& path) {
#ifdef POSIX_FADV_DONTNEED
  const int fd = ::open(path.c_str(), O_RDONLY);
  const bool done = fd >= 0 && ::fsync(fd) == 0 && ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0;
  if (fd >= 0) ::close(fd);
  return done;
#else
  return path.empty();
#endif
}

}  // namespace prefixcache::testing
