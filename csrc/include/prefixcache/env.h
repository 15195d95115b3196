// env.h: the file system as the store sees it, so that tests can break it.
//
// Threads: every method may be called from any thread at once.
// Owns:    files own their descriptor and mapping.
// Units:   bytes; seconds since the epoch for times.
// Errors:  Status NotFound or IOError with errno; nothing throws.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "prefixcache/api.h"
#include "prefixcache/status.h"

namespace prefixcache {

struct FileInfo {
  std::uint64_t size = 0;
  double modified = 0;
  std::uint64_t inode = 0;
  bool is_directory = false;
  bool is_regular = false;
};

struct DirEntry {
  std::string name;
  FileInfo info;
};

// A file open for reading.
class PREFIXCACHE_API ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  virtual const FileInfo& info() const = 0;
  // Fills `out` from `offset`. IOError if the file ends before.
  virtual Status read(std::uint64_t offset, std::span<std::uint8_t> out) const = 0;
  // A hint, before the file is mapped: these bytes are wanted soon. Does not wait for them.
  virtual void will_read(std::uint64_t /*offset*/, std::uint64_t /*size*/) const {}
  // The whole file mapped read-only for as long as this object lives, or an empty span where it cannot be mapped.
  // Reading it may fault if the file shrinks: copy under a FaultGuard.
  virtual std::span<const std::uint8_t> map() = 0;
};

// A small file of which this process, among all that ask, is the only user until the object or the process ends.
class PREFIXCACHE_API LockedFile {
 public:
  virtual ~LockedFile() = default;
  // Fills `out` from the start; what the file lacks stays as it was.
  virtual Status read(std::span<std::uint8_t> out) = 0;
  virtual Status write(std::span<const std::uint8_t> bytes) = 0;
};

class PREFIXCACHE_API Env {
 public:
  virtual ~Env() = default;

  // The real file system. Symbolic links are not followed below a store's directory.
  static Env& posix();

  virtual Status open(const std::string& path, std::unique_ptr<ReadableFile>& out) = 0;
  // Makes a new file (mode 0600) of these pieces. It must not exist. Nothing stays behind on failure.
  virtual Status write_new(const std::string& path, std::span<const std::span<const std::uint8_t>> pieces) = 0;
  virtual Status rename(const std::string& from, const std::string& to) = 0;
  virtual Status remove(const std::string& path) = 0;
  virtual Status stat(const std::string& path, FileInfo& out) = 0;
  virtual Status list(const std::string& path, std::vector<DirEntry>& out) = 0;
  // Makes a directory (mode 0700) and its missing parents. Ok if it is there.
  virtual Status make_directories(const std::string& path) = 0;
  // Ok if `path` is a directory of this user that nobody else may write to; else IOError (EPERM) that says why.
  virtual Status check_private(const std::string& path) = 0;
  // Locks the file at `path`, made (mode 0600) if missing. IOError (EWOULDBLOCK) where others hold it for longer than
  // `seconds`. A file system without locks gives one that excludes nobody.
  virtual Status lock(const std::string& path, double seconds, std::unique_ptr<LockedFile>& out);
  virtual Status set_modified(const std::string& path, double time);
  virtual double now() = 0;
};

}  // namespace prefixcache
