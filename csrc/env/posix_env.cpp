// posix_env.cpp: the real file system.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstring>
#include <thread>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#include "gather/fault_guard.h"
#include "prefixcache/env.h"

namespace prefixcache {

namespace {

Status error(const std::string& what, const std::string& path) {
  const int number = errno;
  const auto code = number == ENOENT || number == ENOTDIR ? StatusCode::NotFound : StatusCode::IOError;
  return {code, what + " " + path + ": " + std::strerror(number), number};
}

FileInfo info_of(const struct stat& st) {
  FileInfo info;
  info.size = static_cast<std::uint64_t>(st.st_size);
#ifdef __APPLE__
  info.modified = static_cast<double>(st.st_mtimespec.tv_sec) + 1e-9 * static_cast<double>(st.st_mtimespec.tv_nsec);
#else
  info.modified = static_cast<double>(st.st_mtim.tv_sec) + 1e-9 * static_cast<double>(st.st_mtim.tv_nsec);
#endif
  info.inode = st.st_ino;
  info.is_directory = S_ISDIR(st.st_mode);
  info.is_regular = S_ISREG(st.st_mode);
  return info;
}

class PosixFile : public ReadableFile {
 public:
  PosixFile(int fd, FileInfo info, std::string path) : fd_(fd), info_(info), path_(std::move(path)) {}
  ~PosixFile() override {
    if (!mapping_.empty()) ::munmap(const_cast<std::uint8_t*>(mapping_.data()), mapping_.size());
    if (fd_ >= 0) ::close(fd_);
  }

  const FileInfo& info() const override { return info_; }

  Status read(std::uint64_t offset, std::span<std::uint8_t> out) const override {
    if (!mapping_.empty()) return read_mapping(offset, out);
    while (!out.empty()) {
      const ssize_t got = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return error("cannot read", path_);
      if (got == 0) return {StatusCode::IOError, "unexpected end of " + path_, EIO};
      out = out.subspan(static_cast<std::size_t>(got));
      offset += static_cast<std::uint64_t>(got);
    }
    return Status::ok();
  }

  void will_read([[maybe_unused]] std::uint64_t offset, [[maybe_unused]] std::uint64_t size) const override {
    if (fd_ < 0) return;
#ifdef F_RDADVISE
    radvisory wanted{static_cast<off_t>(offset), static_cast<int>(std::min<std::uint64_t>(size, INT_MAX))};
    ::fcntl(fd_, F_RDADVISE, &wanted);
#elif defined(POSIX_FADV_WILLNEED)
    ::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(size), POSIX_FADV_WILLNEED);
#endif
  }

  std::span<const std::uint8_t> map() override {
    if (!mapping_.empty() || info_.size == 0) return mapping_;
    void* address = ::mmap(nullptr, info_.size, PROT_READ, MAP_SHARED, fd_, 0);
    if (address == MAP_FAILED) return {};
    mapping_ = {static_cast<const std::uint8_t*>(address), static_cast<std::size_t>(info_.size)};
    // The mapping keeps the file; descriptors are scarcer.
    ::close(fd_);
    fd_ = -1;
    return mapping_;
  }

 private:
  Status read_mapping(std::uint64_t offset, std::span<std::uint8_t> out) const {
    if (offset > mapping_.size() || out.size() > mapping_.size() - offset) {
      return {StatusCode::IOError, "unexpected end of " + path_, EIO};
    }
    if (out.empty()) return Status::ok();
    gather::ensure_fault_handler();
    const std::uint8_t* source = mapping_.data() + offset;
    if (!gather::run_guarded(mapping_, [&] { std::memcpy(out.data(), source, out.size()); })) {
      return {StatusCode::IOError, "file shrank or failed while it was read: " + path_, EIO};
    }
    return Status::ok();
  }

  int fd_;
  FileInfo info_;
  std::string path_;
  std::span<const std::uint8_t> mapping_;
};

Status write_all(int fd, const std::string& path, std::span<const std::span<const std::uint8_t>> pieces) {
  // Some systems refuse one write above 2 GiB.
  constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;
  for (auto piece : pieces) {
    while (!piece.empty()) {
      const ssize_t put = ::write(fd, piece.data(), std::min(piece.size(), kMostAtOnce));
      if (put < 0 && errno == EINTR) continue;
      if (put == 0) errno = ENOSPC;
      if (put <= 0) return error("cannot write", path);
      piece = piece.subspan(static_cast<std::size_t>(put));
    }
  }
  return Status::ok();
}

class PosixLockedFile : public LockedFile {
 public:
  explicit PosixLockedFile(int fd) : fd_(fd) {}
  ~PosixLockedFile() override {
    // Said aloud: a child that was forked meanwhile has a copy of the descriptor.
    ::flock(fd_, LOCK_UN);
    ::close(fd_);
  }
  Status read(std::span<std::uint8_t> out) override {
    return ::pread(fd_, out.data(), out.size(), 0) < 0 ? error("cannot read", "a lock file") : Status::ok();
  }
  Status write(std::span<const std::uint8_t> bytes) override {
    const ssize_t put = ::pwrite(fd_, bytes.data(), bytes.size(), 0);
    if (put < 0) return error("cannot write", "a lock file");
    if (static_cast<std::size_t>(put) != bytes.size()) return {StatusCode::IOError, "cannot write a lock file", ENOSPC};
    return Status::ok();
  }

 private:
  int fd_;
};

// False with errno EWOULDBLOCK where the time is up.
bool lock_in_time(int fd, double seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (auto pause = std::chrono::microseconds(50);; pause = std::min(2 * pause, std::chrono::microseconds(5000))) {
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
    if (errno == ENOLCK || errno == ENOTSUP || errno == EINVAL) return true;
    if (errno != EWOULDBLOCK && errno != EINTR) return false;
    if (std::chrono::steady_clock::now() >= until) {
      errno = EWOULDBLOCK;
      return false;
    }
    std::this_thread::sleep_for(pause);
  }
}

class PosixEnv : public Env {
 public:
  Status open(const std::string& path, std::unique_ptr<ReadableFile>& out) override {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return error("cannot open", path);
    struct stat st;
    if (::fstat(fd, &st) != 0) {
      const Status status = error("cannot stat", path);
      ::close(fd);
      return status;
    }
    if (!S_ISREG(st.st_mode)) {
      ::close(fd);
      return {StatusCode::IOError, "not a regular file: " + path, EINVAL};
    }
    out = std::make_unique<PosixFile>(fd, info_of(st), path);
    return Status::ok();
  }

  Status write_new(const std::string& path, std::span<const std::span<const std::uint8_t>> pieces) override {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return error("cannot make", path);
    Status status = write_all(fd, path, pieces);
    if (::close(fd) != 0 && status.is_ok()) status = error("cannot close", path);
    if (!status.is_ok()) ::unlink(path.c_str());
    return status;
  }

  Status rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) return error("cannot rename to", to);
    return Status::ok();
  }

  Status remove(const std::string& path) override {
    if (::unlink(path.c_str()) != 0) return error("cannot remove", path);
    return Status::ok();
  }

  Status stat(const std::string& path, FileInfo& out) override {
    struct stat st;
    if (::lstat(path.c_str(), &st) != 0) return error("cannot stat", path);
    out = info_of(st);
    return Status::ok();
  }

  Status list(const std::string& path, std::vector<DirEntry>& out) override {
    DIR* directory = ::opendir(path.c_str());
    if (directory == nullptr) return error("cannot list", path);
    out.clear();
    errno = 0;
    for (; const dirent* item = ::readdir(directory); errno = 0) {
      const std::string name = item->d_name;
      if (name == "." || name == "..") continue;
      struct stat st;
      if (::fstatat(::dirfd(directory), name.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0) continue;
      out.push_back({name, info_of(st)});
    }
    // Half a list must not pass for a whole one.
    const Status status = errno == 0 ? Status::ok() : error("cannot list", path);
    ::closedir(directory);
    return status;
  }

  Status make_directories(const std::string& path) override {
    for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
      const std::string part = path.substr(0, end);
      if (::mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) return error("cannot make directory", part);
      if (end == std::string::npos) break;
    }
    struct stat st;
    if (::stat(path.c_str(), &st) != 0) return error("cannot stat", path);
    if (!S_ISDIR(st.st_mode)) return {StatusCode::IOError, "not a directory: " + path, ENOTDIR};
    return Status::ok();
  }

  Status check_private(const std::string& path) override {
    struct stat st;
    if (::stat(path.c_str(), &st) != 0) return error("cannot stat", path);
    if (!S_ISDIR(st.st_mode)) return {StatusCode::IOError, "not a directory: " + path, ENOTDIR};
    if (st.st_uid != ::geteuid()) {
      return {StatusCode::IOError,
              path + " belongs to user " + std::to_string(st.st_uid) + ", not to this one (" +
                  std::to_string(::geteuid()) + ")",
              EPERM};
    }
    if ((st.st_mode & 022) != 0) {
      return {StatusCode::IOError, path + " may be written by its group or by others: chmod go-w it", EPERM};
    }
    return Status::ok();
  }

  Status lock(const std::string& path, double seconds, std::unique_ptr<LockedFile>& out) override {
    for (;;) {
      const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
      if (fd < 0) return error("cannot open", path);
      struct stat st = {};
      if (!lock_in_time(fd, seconds) || ::fstat(fd, &st) != 0) {
        const Status status = error("cannot lock", path);
        ::close(fd);
        return status;
      }
      out = std::make_unique<PosixLockedFile>(fd);
      // Removed before it was locked: others lock a new one of this name.
      if (st.st_nlink != 0) return Status::ok();
    }
  }

  Status set_modified(const std::string& path, double time) override {
    const double whole = std::floor(time);
    timespec times[2];
    times[0].tv_sec = 0;
    times[0].tv_nsec = UTIME_OMIT;
    times[1].tv_sec = static_cast<time_t>(whole);
    times[1].tv_nsec = static_cast<long>((time - whole) * 1e9);
    if (::utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW) != 0) return error("cannot date", path);
    return Status::ok();
  }

  double now() override {
    timeval time;
    ::gettimeofday(&time, nullptr);
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  }
};

}  // namespace

Status Env::lock(const std::string& path, double seconds, std::unique_ptr<LockedFile>& out) {
  return posix().lock(path, seconds, out);
}

Status Env::set_modified(const std::string& path, double time) {
  return posix().set_modified(path, time);
}

Env& Env::posix() {
  // Never destroyed: calls that hang may come back while the process ends.
  static PosixEnv& env = *new PosixEnv;
  return env;
}

}  // namespace prefixcache
