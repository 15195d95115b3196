// faulty_env.h: the real file system, with faults on demand.
//
// Threads: any; switches may be changed while a store uses the file system.
#pragma once

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "prefixcache/env.h"

namespace prefixcache::testing {

class FaultyEnv : public Env {
 public:
  // An errno that the operation answers with; 0: it works.
  std::atomic<int> write_error{0};
  std::atomic<int> rename_error{0};
  std::atomic<int> open_error{0};
  std::atomic<int> read_error{0};
  std::atomic<bool> refuse_to_map{false};
  // Seconds added to the clock.
  std::atomic<double> clock_offset{0};
  std::atomic<int> opens{0};
  std::atomic<int> writes{0};
  // As many files may be open and not mapped at once.
  std::atomic<int> most_descriptors{1 << 20};
  // Called with the path of each file that was opened and whose first bytes were asked for.
  std::function<void(const std::string&)> on_will_read;
  // Called with the path of each file that was just mapped: what happens here happens in the middle of a read.
  std::function<void(const std::string&)> after_map;
  // Replaces the answer of check_private where it is not Ok.
  Status private_answer;

  // Every path that was named to the file system and does not lie in `directory`, each once.
  std::vector<std::string> stray_paths(const std::string& directory) {
    std::lock_guard lock(mutex_);
    std::vector<std::string> strays;
    for (const auto& path : named_) {
      if (path != directory && (!path.starts_with(directory + "/") || path.find("/../") != std::string::npos)) {
        strays.push_back(path);
      }
    }
    return strays;
  }

  // While held, every write waits.
  void hold_writes() {
    std::lock_guard lock(mutex_);
    held_ = true;
  }
  void release_writes() {
    std::lock_guard lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }
  // Returns when a write waits in a held state.
  void wait_for_write() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }

  Status open(const std::string& path, std::unique_ptr<ReadableFile>& out) override {
    ++opens;
    note(path);
    if (open_error != 0) return failed(open_error, path);
    std::unique_ptr<ReadableFile> real;
    if (Status status = real_.open(path, real); !status.is_ok()) return status;
    auto file = std::make_unique<File>(*this, std::move(real), path);
    if (*descriptors_ > most_descriptors) return failed(EMFILE, path);
    out = std::move(file);
    return Status::ok();
  }

  Status write_new(const std::string& path, std::span<const std::span<const std::uint8_t>> pieces) override {
    note(path);
    {
      std::unique_lock lock(mutex_);
      ++waiting_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return !held_; });
      --waiting_;
    }
    ++writes;
    if (write_error != 0) return failed(write_error, path);
    return real_.write_new(path, pieces);
  }

  Status rename(const std::string& from, const std::string& to) override {
    note(from);
    note(to);
    if (rename_error != 0) return failed(rename_error, to);
    return real_.rename(from, to);
  }
  Status remove(const std::string& path) override { return real_.remove(note(path)); }
  Status stat(const std::string& path, FileInfo& out) override { return real_.stat(note(path), out); }
  Status list(const std::string& path, std::vector<DirEntry>& out) override { return real_.list(note(path), out); }
  Status make_directories(const std::string& path) override { return real_.make_directories(note(path)); }
  Status check_private(const std::string& path) override {
    return private_answer.is_ok() ? real_.check_private(path) : private_answer;
  }
  double now() override { return real_.now() + clock_offset; }

 private:
  class File : public ReadableFile {
   public:
    File(FaultyEnv& env, std::unique_ptr<ReadableFile> real, std::string path)
        : env_(env), descriptors_(env.descriptors_), real_(std::move(real)), path_(std::move(path)) {
      ++*descriptors_;
    }
    const FileInfo& info() const override { return real_->info(); }
    Status read(std::uint64_t offset, std::span<std::uint8_t> out) const override {
      if (env_.read_error != 0) return failed(env_.read_error, path_);
      return real_->read(offset, out);
    }
    ~File() override { close(); }
    void will_read(std::uint64_t offset, std::uint64_t size) const override {
      real_->will_read(offset, size);
      if (env_.on_will_read) env_.on_will_read(path_);
    }
    std::span<const std::uint8_t> map() override {
      if (env_.refuse_to_map) return {};
      close();
      const auto mapping = real_->map();
      if (env_.after_map) env_.after_map(path_);
      return mapping;
    }

   private:
    // A mapped file has no descriptor any more.
    void close() {
      if (!std::exchange(closed_, true)) --*descriptors_;
    }

    FaultyEnv& env_;
    std::shared_ptr<std::atomic<int>> descriptors_;
    std::unique_ptr<ReadableFile> real_;
    std::string path_;
    bool closed_ = false;
  };

  static Status failed(int number, const std::string& path) {
    return {StatusCode::IOError, path + ": " + std::strerror(number), number};
  }

  const std::string& note(const std::string& path) {
    std::lock_guard lock(mutex_);
    named_.insert(path);
    return path;
  }

  Env& real_ = Env::posix();
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  int waiting_ = 0;
  std::set<std::string> named_;
  // Files may outlive this.
  std::shared_ptr<std::atomic<int>> descriptors_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace prefixcache::testing
