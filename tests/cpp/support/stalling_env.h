// stalling_env.h: a file system that can stop answering, as a sleeping disk or a network drive does.
//
// Threads: any. What waits when it is destroyed waits for ever: let go first.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>
#include <string>

#include "support/faulty_env.h"

namespace prefixcache::testing {

class StallingEnv : public FaultyEnv {
 public:
  // Calls of this name wait: open, read, stat, list, write, rename, remove, lock, date.
  void stall(const std::string& call) {
    std::lock_guard lock(gate_);
    stalled_.insert(call);
  }
  void let_go() {
    std::lock_guard lock(gate_);
    stalled_.clear();
    opened_.notify_all();
  }
  int waiting() {
    std::lock_guard lock(gate_);
    return waiting_;
  }

  Status open(const std::string& path, std::unique_ptr<ReadableFile>& out) override {
    wait("open");
    std::unique_ptr<ReadableFile> file;
    if (Status status = FaultyEnv::open(path, file); !status.is_ok()) return status;
    out = std::make_unique<File>(*this, std::move(file));
    return Status::ok();
  }
  Status write_new(const std::string& path, std::span<const std::span<const std::uint8_t>> pieces) override {
    wait("write");
    return FaultyEnv::write_new(path, pieces);
  }
  Status rename(const std::string& from, const std::string& to) override {
    wait("rename");
    return FaultyEnv::rename(from, to);
  }
  Status remove(const std::string& path) override {
    wait("remove");
    return FaultyEnv::remove(path);
  }
  Status stat(const std::string& path, FileInfo& out) override {
    wait("stat");
    return FaultyEnv::stat(path, out);
  }
  Status list(const std::string& path, std::vector<DirEntry>& out) override {
    wait("list");
    return FaultyEnv::list(path, out);
  }
  Status lock(const std::string& path, double seconds, std::unique_ptr<LockedFile>& out) override {
    wait("lock");
    return FaultyEnv::lock(path, seconds, out);
  }
  Status set_modified(const std::string& path, double time) override {
    wait("date");
    return FaultyEnv::set_modified(path, time);
  }

 private:
  // Not mapped, so that every byte comes through read().
  class File : public ReadableFile {
   public:
    File(StallingEnv& env, std::unique_ptr<ReadableFile> real) : env_(env), real_(std::move(real)) {}
    const FileInfo& info() const override { return real_->info(); }
    Status read(std::uint64_t offset, std::span<std::uint8_t> out) const override {
      env_.wait("read");
      return real_->read(offset, out);
    }
    std::span<const std::uint8_t> map() override { return {}; }

   private:
    StallingEnv& env_;
    std::unique_ptr<ReadableFile> real_;
  };

  void wait(const std::string& call) {
    std::unique_lock lock(gate_);
    if (!stalled_.contains(call)) return;
    ++waiting_;
    opened_.wait(lock, [&] { return !stalled_.contains(call); });
    --waiting_;
  }

  std::mutex gate_;
  std::condition_variable opened_;
  std::set<std::string> stalled_;
  int waiting_ = 0;
};

}  // namespace prefixcache::testing
