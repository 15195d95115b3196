// usage.h: how many bytes lie below a directory, as all processes that write there know it together.
//
// Threads: any. Processes: any number; each change is made under a lock on one small file.
// Owns:    the file `.usage`, 64 bytes.
// Units:   bytes, seconds.
// Errors:  IOError where the file cannot be locked, read or written; NotFound where the sum is not known: count first.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "prefixcache/env.h"

namespace prefixcache::store {

class Usage {
 public:
  Usage(Env& env, std::string path) : env_(env), path_(std::move(path)) {}

  // Takes `bytes` out of what `limit` leaves. Sets `granted`.
  Status reserve(std::uint64_t bytes, std::uint64_t limit, bool& granted);
  // Gives reserved bytes back that came to nothing. What cannot be told now is told with the next change.
  void release(std::uint64_t bytes);
  // Removes a file and gives its bytes back, in one step for all others. For a file that is missing already they are
  // given back unless another store or a count may have done so; then `told` is false: only a count can tell.
  Status remove(const std::string& path, std::uint64_t bytes, bool& told);

  // Gives a file of so many bytes another name. Those of the file that had this name are given back in the same step.
  Status rename(const std::string& from, const std::string& to, std::uint64_t bytes);

  // Around a count of what is there. What was reserved meanwhile is added to it, for it may not have been seen.
  Status begin_count();
  Status end_count(std::uint64_t bytes);

  // Whether others have reserved anything in the last minute or since this was asked last: what it was for may be there
  // now, or come still.
  bool others_reserved();

  // As last seen. Waits for nothing.
  std::uint64_t used() const { return used_.load(); }

 private:
  struct Record {
    std::uint64_t used = 0;
    std::uint64_t reserved_ever = 0;
    std::uint64_t removed_ever = 0;  // files that stores removed, and counts, which leave out what others removed
  };

  // Locks the file and reads it. NotFound, with the lock held, where there is no sum in it.
  Status lock(std::unique_ptr<LockedFile>& file, Record& record);
  void give_back(const Status& locked, LockedFile* file, Record& record, std::uint64_t bytes, std::uint64_t files);
  Status write(LockedFile& file, const Record& record);

  Env& env_;
  const std::string path_;
  std::mutex mutex_;  // held while the file is locked
  std::atomic<std::uint64_t> used_{0};
  std::uint64_t unsaid_bytes_ = 0;
  std::uint64_t unsaid_files_ = 0;
  std::uint64_t own_removed_ = 0;  // since the last count
  std::uint64_t own_reserved_ = 0;
  std::uint64_t others_seen_ = 0;
  double others_seen_at_ = 0;
  std::uint64_t removed_at_count_ = 0;
  std::uint64_t reserved_at_count_ = 0;
};

}  // namespace prefixcache::store
