// memory_env.h: a file system in memory, for tests that make very many small files.
//
// Threads: any.
// Owns:    the files' bytes; open files keep theirs.
#pragma once

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "prefixcache/env.h"

namespace prefixcache::testing {

class MemoryEnv : public Env {
 public:
  // Every path and its bytes, for the test to look at and to change while nothing uses the file system.
  std::map<std::string, std::shared_ptr<const std::string>> files;

  void put(const std::string& path, std::string bytes) {
    files[path] = std::make_shared<const std::string>(std::move(bytes));
  }

  Status open(const std::string& path, std::unique_ptr<ReadableFile>& out) override {
    std::lock_guard lock(mutex_);
    const auto found = files.find(path);
    if (found == files.end()) return missing(path);
    out = std::make_unique<File>(found->second);
    return Status::ok();
  }
  Status write_new(const std::string& path, std::span<const std::span<const std::uint8_t>> pieces) override {
    std::string bytes;
    for (const auto piece : pieces) bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    std::lock_guard lock(mutex_);
    if (files.contains(path)) return {StatusCode::IOError, path + " is there", EEXIST};
    put(path, std::move(bytes));
    return Status::ok();
  }
  Status rename(const std::string& from, const std::string& to) override {
    std::lock_guard lock(mutex_);
    const auto found = files.find(from);
    if (found == files.end()) return missing(from);
    files[to] = found->second;
    files.erase(from);
    return Status::ok();
  }
  Status remove(const std::string& path) override {
    std::lock_guard lock(mutex_);
    return files.erase(path) != 0 ? Status::ok() : missing(path);
  }
  Status stat(const std::string& path, FileInfo& out) override {
    std::lock_guard lock(mutex_);
    const auto found = files.find(path);
    out = found == files.end() ? FileInfo{} : info_of(*found->second);
    out.is_directory = found == files.end();
    return found != files.end() || is_directory(path) ? Status::ok() : missing(path);
  }
  // Of directories only those are listed in which something lies.
  Status list(const std::string& path, std::vector<DirEntry>& out) override {
    std::lock_guard lock(mutex_);
    out.clear();
    const std::string folder = path + "/";
    for (auto at = files.lower_bound(folder); at != files.end() && at->first.starts_with(folder); ++at) {
      const std::string below = at->first.substr(folder.size());
      const std::string name = below.substr(0, below.find('/'));
      if (!out.empty() && out.back().name == name) continue;
      DirEntry entry{name, info_of(*at->second)};
      if (name != below) {
        entry.info = {};
        entry.info.is_directory = true;
      }
      out.push_back(entry);
    }
    return Status::ok();
  }
  Status make_directories(const std::string& path) override {
    std::lock_guard lock(mutex_);
    for (std::size_t end = path.size(); end != std::string::npos && end != 0; end = path.rfind('/', end - 1)) {
      made_.insert(path.substr(0, end));
    }
    return Status::ok();
  }
  Status check_private(const std::string&) override { return Status::ok(); }
  Status lock(const std::string& path, double, std::unique_ptr<LockedFile>& out) override {
    out = std::make_unique<Locked>(*this, path);
    return Status::ok();
  }
  Status set_modified(const std::string&, double) override { return Status::ok(); }
  double now() override { return 1e9; }

 private:
  // There is but one process.
  class Locked : public LockedFile {
   public:
    Locked(MemoryEnv& env, std::string path) : env_(env), path_(std::move(path)) {}
    Status read(std::span<std::uint8_t> out) override {
      std::lock_guard lock(env_.mutex_);
      const auto found = env_.files.find(path_);
      if (found != env_.files.end()) {
        std::copy_n(found->second->data(), std::min(out.size(), found->second->size()), out.data());
      }
      return Status::ok();
    }
    Status write(std::span<const std::uint8_t> bytes) override {
      std::lock_guard lock(env_.mutex_);
      env_.put(path_, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      return Status::ok();
    }

   private:
    MemoryEnv& env_;
    std::string path_;
  };

  class File : public ReadableFile {
   public:
    explicit File(std::shared_ptr<const std::string> bytes) : bytes_(std::move(bytes)), info_(info_of(*bytes_)) {}
    const FileInfo& info() const override { return info_; }
    Status read(std::uint64_t offset, std::span<std::uint8_t> out) const override {
      if (offset > bytes_->size() || out.size() > bytes_->size() - offset) {
        return {StatusCode::IOError, "unexpected end", EIO};
      }
      std::copy_n(bytes_->data() + offset, out.size(), out.data());
      return Status::ok();
    }
    std::span<const std::uint8_t> map() override {
      return {reinterpret_cast<const std::uint8_t*>(bytes_->data()), bytes_->size()};
    }

   private:
    std::shared_ptr<const std::string> bytes_;
    FileInfo info_;
  };

  static Status missing(const std::string& path) { return {StatusCode::NotFound, path + " is not there", ENOENT}; }
  static FileInfo info_of(const std::string& bytes) {
    FileInfo info;
    info.size = bytes.size();
    info.modified = 1e9;
    info.is_regular = true;
    return info;
  }
  bool is_directory(const std::string& path) const {
    if (made_.contains(path)) return true;
    const auto at = files.lower_bound(path + "/");
    return at == files.end() ? false : at->first.starts_with(path + "/");
  }

  std::set<std::string> made_;  // directories
  std::mutex mutex_;
};

}  // namespace prefixcache::testing
