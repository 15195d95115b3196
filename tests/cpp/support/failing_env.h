// failing_env.h: a file system that fails at a stated call, in a stated way.
//
// Threads: any. Calls are numbered in the order in which they come.
#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/faulty_env.h"
#include "support/temp_dir.h"

namespace prefixcache::testing {

enum class Call { open, read, map, write, rename, remove, stat, list, make, check, lock, date };

enum class Fault {
  error,        // the call answers with an errno and does nothing
  slow,         // it takes its time
  short_write,  // half of the file is there, and an error
  lost_data,    // the file has its length, its second half never reached the disk, and no error
  torn_rename,  // under the new name there is half a file, and no error
  late_rename,  // it is done, and an error
  lost_rename,  // nothing is done, and no error
  bad_read,     // one bit is another, and no error
  cut_map,      // half of the file is gone once it is mapped
};

class FailingEnv : public FaultyEnv {
 public:
  // Fails at call `at` (1, 2, ...), and with `lasting` at every later one that can fail in this way.
  void arm(Fault fault, int number, std::size_t at, bool lasting) {
    fault_ = fault;
    number_ = number;
    at_ = at;
    lasting_ = lasting;
  }
  void disarm() { at_ = 0; }

  std::vector<Call> calls() {
    std::lock_guard lock(calls_mutex_);
    return calls_;
  }
  // How many of these calls failed.
  std::size_t failed(Call call) const { return failed_[static_cast<std::size_t>(call)]; }

  static bool can_fail(Call call, Fault fault) {
    switch (fault) {
      case Fault::error:
      case Fault::slow:
        return true;
      case Fault::short_write:
      case Fault::lost_data:
        return call == Call::write;
      case Fault::torn_rename:
      case Fault::late_rename:
      case Fault::lost_rename:
        return call == Call::rename;
      case Fault::bad_read:
        return call == Call::read;
      case Fault::cut_map:
        return call == Call::map;
    }
    return false;
  }

  Status open(const std::string& path, std::unique_ptr<ReadableFile>& out) override {
    if (Status status = fail(Call::open, path); !status.is_ok()) return status;
    std::unique_ptr<ReadableFile> real;
    if (Status status = FaultyEnv::open(path, real); !status.is_ok()) return status;
    out = std::make_unique<File>(*this, std::move(real), path);
    return Status::ok();
  }

  Status write_new(const std::string& path, std::span<const std::span<const std::uint8_t>> pieces) override {
    const bool fails = hit(Call::write);
    if (fails && fault_ == Fault::error) return error(path);
    Status status = FaultyEnv::write_new(path, pieces);
    if (!fails || !status.is_ok()) return status;
    std::string content = read_file(path);
    const std::size_t half = content.size() / 2;
    content.resize(half);
    if (fault_ == Fault::lost_data) content.resize(2 * half + content.size() % 2, '\0');
    write_file(path, content);
    return fault_ == Fault::short_write ? error(path) : Status::ok();
  }

  Status rename(const std::string& from, const std::string& to) override {
    const bool fails = hit(Call::rename);
    if (fails && fault_ == Fault::error) return error(to);
    if (fails && fault_ == Fault::lost_rename) return Status::ok();
    Status status = FaultyEnv::rename(from, to);
    if (fails && fault_ == Fault::late_rename) return error(to);
    if (fails && fault_ == Fault::torn_rename) std::filesystem::resize_file(to, std::filesystem::file_size(to) / 2);
    return status;
  }

  Status remove(const std::string& path) override {
    Status status = fail(Call::remove, path);
    return status.is_ok() ? FaultyEnv::remove(path) : status;
  }
  Status stat(const std::string& path, FileInfo& out) override {
    Status status = fail(Call::stat, path);
    return status.is_ok() ? FaultyEnv::stat(path, out) : status;
  }
  Status list(const std::string& path, std::vector<DirEntry>& out) override {
    Status status = fail(Call::list, path);
    return status.is_ok() ? FaultyEnv::list(path, out) : status;
  }
  Status make_directories(const std::string& path) override {
    Status status = fail(Call::make, path);
    return status.is_ok() ? FaultyEnv::make_directories(path) : status;
  }
  Status check_private(const std::string& path) override {
    Status status = fail(Call::check, path);
    return status.is_ok() ? FaultyEnv::check_private(path) : status;
  }
  Status lock(const std::string& path, double seconds, std::unique_ptr<LockedFile>& out) override {
    Status status = fail(Call::lock, path);
    return status.is_ok() ? FaultyEnv::lock(path, seconds, out) : status;
  }
  Status set_modified(const std::string& path, double time) override {
    Status status = fail(Call::date, path);
    return status.is_ok() ? FaultyEnv::set_modified(path, time) : status;
  }

 private:
  class File : public ReadableFile {
   public:
    File(FailingEnv& env, std::unique_ptr<ReadableFile> real, std::string path)
        : env_(env), real_(std::move(real)), path_(std::move(path)) {}
    const FileInfo& info() const override { return real_->info(); }
    Status read(std::uint64_t offset, std::span<std::uint8_t> out) const override {
      const bool fails = env_.hit(Call::read);
      if (fails && env_.fault_ == Fault::error) return env_.error(path_);
      Status status = real_->read(offset, out);
      if (fails && env_.fault_ == Fault::bad_read && !out.empty()) out[out.size() / 2] ^= 0x20;
      return status;
    }
    std::span<const std::uint8_t> map() override {
      const bool fails = env_.hit(Call::map);
      if (fails && env_.fault_ == Fault::error) return {};
      const auto mapping = real_->map();
      if (fails && env_.fault_ == Fault::cut_map) {
        std::error_code gone;
        std::filesystem::resize_file(path_, real_->info().size / 2, gone);
      }
      return mapping;
    }

   private:
    FailingEnv& env_;
    std::unique_ptr<ReadableFile> real_;
    std::string path_;
  };

  bool hit(Call call) {
    std::size_t number = 0;
    {
      std::lock_guard lock(calls_mutex_);
      calls_.push_back(call);
      number = calls_.size();
    }
    const bool now = at_ != 0 && (lasting_ ? number >= at_ : number == at_) && can_fail(call, fault_);
    if (!now) return false;
    if (fault_ == Fault::slow) {
      std::this_thread::sleep_for(std::chrono::milliseconds(number_));
      return false;
    }
    ++failed_[static_cast<std::size_t>(call)];
    return true;
  }
  Status fail(Call call, const std::string& path) { return hit(call) ? error(path) : Status::ok(); }
  Status error(const std::string& path) const {
    const auto code = number_ == ENOENT ? StatusCode::NotFound : StatusCode::IOError;
    return {code, path + ": " + std::strerror(number_), number_};
  }

  std::atomic<Fault> fault_{Fault::error};
  std::atomic<int> number_{EIO};
  std::atomic<std::size_t> at_{0};
  std::atomic<bool> lasting_{false};
  std::mutex calls_mutex_;
  std::vector<Call> calls_;
  std::atomic<std::size_t> failed_[12] = {};
};

}  // namespace prefixcache::testing
