#include "store/usage.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "hash/checksum.h"

namespace prefixcache::store {

namespace {

constexpr std::uint64_t kMagic = 0x3167736570636b70;  // "pkcpesg1"
constexpr std::size_t kFileBytes = 64;
// A process that was stopped while it held the lock is not waited for any longer.
constexpr double kLockSeconds = 2.0;
// A file may get its name so many seconds after its bytes were reserved.
constexpr double kMayCome = 60;

using Words = std::array<std::uint64_t, 5>;

std::uint64_t checksum(const Words& words) {
  return hash::xxh3_64({reinterpret_cast<const std::uint8_t*>(words.data()), 4 * sizeof(std::uint64_t)});
}

std::uint64_t less(std::uint64_t from, std::uint64_t bytes) {
  return from - std::min(from, bytes);
}

}  // namespace

Status Usage::lock(std::unique_ptr<LockedFile>& file, Record& record) {
  if (Status status = env_.lock(path_, kLockSeconds, file); !status.is_ok()) return status;
  std::array<std::uint8_t, kFileBytes> bytes{};
  if (Status status = file->read(bytes); !status.is_ok()) return status;
  Words words;
  std::memcpy(words.data(), bytes.data(), sizeof words);
  if (words[0] != kMagic || words[4] != checksum(words)) {
    return {StatusCode::NotFound, "nobody has counted the bytes of this directory yet"};
  }
  record = {words[1], words[2], words[3]};
  record.used = less(record.used, unsaid_bytes_);
  record.removed_ever += unsaid_files_;
  return Status::ok();
}

Status Usage::write(LockedFile& file, const Record& record) {
  Words words = {kMagic, record.used, record.reserved_ever, record.removed_ever, 0};
  words[4] = checksum(words);
  std::array<std::uint8_t, kFileBytes> bytes{};
  std::memcpy(bytes.data(), words.data(), sizeof words);
  if (Status status = file.write(bytes); !status.is_ok()) return status;
  unsaid_bytes_ = unsaid_files_ = 0;
  used_ = record.used;
  return Status::ok();
}

Status Usage::reserve(std::uint64_t bytes, std::uint64_t limit, bool& granted) {
  std::lock_guard guard(mutex_);
  granted = false;
  std::unique_ptr<LockedFile> file;
  Record record;
  if (Status status = lock(file, record); !status.is_ok()) return status;
  used_ = record.used;
  if (record.used > limit || bytes > limit - record.used || limit - record.used - bytes < kFileBytes) {
    return Status::ok();
  }
  record.used += bytes;
  record.reserved_ever += bytes;
  Status status = write(*file, record);
  granted = status.is_ok();
  if (granted) own_reserved_ += bytes;
  return status;
}

void Usage::release(std::uint64_t bytes) {
  std::lock_guard guard(mutex_);
  std::unique_ptr<LockedFile> file;
  Record record;
  const Status locked = lock(file, record);
  give_back(locked, file.get(), record, bytes, 0);
}

void Usage::give_back(const Status& locked, LockedFile* file, Record& record, std::uint64_t bytes,
                      std::uint64_t files) {
  own_removed_ += files;
  record.used = less(record.used, bytes);
  record.removed_ever += files;
  if (locked.is_ok() && write(*file, record).is_ok()) return;
  used_ = less(used_, bytes);
  // Where nobody has counted, somebody will, from nothing.
  const bool counts = locked.code() != StatusCode::NotFound;
  unsaid_bytes_ = counts ? unsaid_bytes_ + bytes : 0;
  unsaid_files_ = counts ? unsaid_files_ + files : 0;
}

Status Usage::remove(const std::string& path, std::uint64_t bytes, bool& told) {
  std::lock_guard guard(mutex_);
  std::unique_ptr<LockedFile> file;
  Record record;
  const Status locked = lock(file, record);
  const bool others_removed = record.removed_ever != removed_at_count_ + own_removed_;
  // A count may have seen it after somebody cut it.
  if (FileInfo info; env_.stat(path, info).is_ok()) bytes = std::min(bytes, info.size);
  Status status = env_.remove(path);
  told = status.code() != StatusCode::NotFound || (locked.is_ok() && !others_removed);
  if (status.is_ok()) {
    give_back(locked, file.get(), record, bytes, 1);
  } else if (status.code() == StatusCode::NotFound && told) {
    give_back(locked, file.get(), record, bytes, 0);
  }
  return status;
}

Status Usage::rename(const std::string& from, const std::string& to, std::uint64_t bytes) {
  FileInfo info;
  // Mostly nothing has this name, and what others give it in this moment is counted twice until the next count.
  if (!env_.stat(to, info).is_ok()) return env_.rename(from, to);
  std::lock_guard guard(mutex_);
  std::unique_ptr<LockedFile> file;
  Record record;
  const Status locked = lock(file, record);
  const bool replaces = env_.stat(to, info).is_ok() && info.is_regular;
  Status status = env_.rename(from, to);
  if (status.is_ok() && replaces) give_back(locked, file.get(), record, std::min(bytes, info.size), 0);
  return status;
}

Status Usage::begin_count() {
  std::lock_guard guard(mutex_);
  std::unique_ptr<LockedFile> file;
  Record record;
  Status status = lock(file, record);
  if (!status.is_ok() && status.code() != StatusCode::NotFound) return status;
  if (file == nullptr) return status;  // no folder to put it in
  reserved_at_count_ = record.reserved_ever;
  removed_at_count_ = record.removed_ever;
  own_removed_ = 0;
  return Status::ok();
}

Status Usage::end_count(std::uint64_t bytes) {
  std::lock_guard guard(mutex_);
  std::unique_ptr<LockedFile> file;
  Record record;
  Status status = lock(file, record);
  if (file == nullptr || (!status.is_ok() && status.code() != StatusCode::NotFound)) return status;
  record.used = bytes + less(record.reserved_ever, reserved_at_count_);
  // Files that others know of and that were missing are out of the sum now.
  ++record.removed_ever;
  ++own_removed_;
  return write(*file, record);
}

bool Usage::others_reserved() {
  std::lock_guard guard(mutex_);
  std::unique_ptr<LockedFile> file;
  Record record;
  if (!lock(file, record).is_ok()) return false;
  used_ = record.used;
  // A file that was made anew begins at 0: the difference is a number like any other.
  const std::uint64_t others = record.reserved_ever - own_reserved_;
  const double now = env_.now();
  if (std::exchange(others_seen_, others) != others) others_seen_at_ = now;
  return now - others_seen_at_ < kMayCome;
}

}  // namespace prefixcache::store
