// store_impl.cpp: opening, closing, forgetting, counting.
#include "store/store_impl.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "layout/block_file.h"

namespace prefixcache {

namespace store {

namespace {

// A larger directory is listed while the store serves.
constexpr double kOpenWaits = 0.5;
// erase() and clear() need to know all files. A disk that takes longer has stalled.
constexpr double kRemovalWaits = 60;
constexpr double kSecondsARemoval = 0.01;
// As long as a machine runs without a pause, and no number that clocks cannot add.
constexpr double kMostSeconds = 1e9;

[[noreturn]] void refuse(const std::string& field, const std::string& value, const std::string& expected) {
  throw std::invalid_argument("[BlockStore::open] " + field + " is " + value + ", expected " + expected);
}

bool is_name(const std::string& text) {
  const auto allowed = [](char c) {
    return (std::isalnum(static_cast<unsigned char>(c)) != 0 && static_cast<unsigned char>(c) < 128) || c == '.' ||
           c == '_' || c == '-';
  };
  return !text.empty() && text.size() <= 128 && text[0] != '.' && std::all_of(text.begin(), text.end(), allowed);
}

const Options& checked(const Options& options) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 60;
  if (!is_name(options.name_space)) {
    refuse("name_space", "'" + options.name_space + "'", "1..128 characters of [A-Za-z0-9._-], not beginning with '.'");
  }
  if (options.directory.empty() && options.write != WritePolicy::ram_only) {
    refuse("directory", "''", "a path (only ram_only works without one)");
  }
  if (options.directory.find('\0') != std::string::npos) {
    refuse("directory", "a text with a zero byte", "a path");
  }
  for (const auto& [field, value] :
       {std::pair{"ram_bytes", options.ram_bytes}, std::pair{"disk_bytes", options.disk_bytes},
        std::pair{"queue_bytes", options.queue_bytes}}) {
    if (value > kMostBytes) refuse(field, std::to_string(value), "at most 2^60 bytes");
  }
  for (const auto& [field, value] : {std::pair{"put_wait_seconds", options.put_wait_seconds},
                                     std::pair{"disk_wait_seconds", options.disk_wait_seconds},
                                     std::pair{"flush_wait_seconds", options.flush_wait_seconds},
                                     std::pair{"temp_grace_seconds", options.temp_grace_seconds}}) {
    if (!(value >= 0 && value <= kMostSeconds)) refuse(field, std::to_string(value), "seconds, 0..10^9");
  }
  if (options.threads < 0 || options.threads > 256) refuse("threads", std::to_string(options.threads), "0..256");
  return options;
}

}  // namespace

StoreImpl::StoreImpl(const Options& options, bool arena, const gather::DeviceGather* device)
    : options_(checked(options)),
      arena_(arena),
      env_(options.env != nullptr ? *options.env : Env::posix()),
      pool_(std::make_shared<BufferPool>(options.ram_bytes, arena ? slab_memory() : mapped_memory())),
      queue_pool_(std::make_shared<BufferPool>(options.queue_bytes)),
      threads_(options.threads),
      device_(device) {
  if (options_.write == WritePolicy::ram_only) return;
  while (options_.directory.size() > 1 && options_.directory.back() == '/') options_.directory.pop_back();
  directory_ = std::make_unique<Directory>(env_, options_.directory, options_.name_space, options_.temp_grace_seconds);
  Status ready = ask_disk<Status>([this] { return directory_->prepare(); }, no_answer());
  if (ready.error_number() == EPERM || ready.error_number() == ENOTDIR) {
    refuse("directory", "'" + options_.directory + "'", "a directory only this user can write to: " + ready.message());
  }
  ready_ = ready.is_ok();
  writer_ = std::make_unique<Writer>(
      options_.queue_bytes, [this](const auto& image) { return write_image(image); }, [this] { return idle(); });
  try {
    writer_->start();
  } catch (const std::system_error& e) {
    // The system has no more threads: as good as no disk.
    writer_.reset();
    directory_.reset();
    stats_.degraded = true;
    stats_.last_error = std::string("no thread that writes, so all stays in RAM: ") + e.what();
    return;
  }
  if (!ready_) disk_failed(ready);
  wait_for_scan(kOpenWaits);
}

StoreImpl::~StoreImpl() {
  close();
}

layout::NameInfo StoreImpl::name_of(const PartRecord& record) {
  return {record.entry->key, record.entry->parent_prefix, record.entry->depth, record.part};
}

void StoreImpl::drop(PartRecord& record, std::vector<FileToRemove>& files) {
  if (record.on_disk) files.push_back({name_of(record), record.file_bytes});
  index_.remove(record);
}

Status StoreImpl::remove_files(const std::vector<FileToRemove>& files) {
  Status first;
  for (const auto& file : files) {
    Status status = directory_->remove(file.name, file.bytes);
    if (!status.is_ok() && first.is_ok()) first = std::move(status);
  }
  // Only now: a listing that began after the number had changed could still show a file that was about to go.
  if (!files.empty()) ++removals_;
  if (directory_ != nullptr && directory_->count_wanted()) writer_->poke();
  return first;
}

bool StoreImpl::changed_on_disk(const layout::NameInfo& name, std::uint64_t bytes) const {
  FileInfo info;
  const Status status = env_.stat(directory_->path_of(name), info);
  return status.code() == StatusCode::NotFound || (status.is_ok() && info.size != bytes);
}

void StoreImpl::forget_now(const Key& key, Part part, std::uint64_t version, const Status& why) {
  std::lock_guard names_lock(names_mutex_);
  FileToRemove file;
  {
    Lock lock(mutex_);
    const PartRecord* record = index_.find(key, part);
    // Rows in RAM were put after the read that failed.
    if (record == nullptr || record->version != version || record->image != nullptr) return;
    file = {name_of(*record), record->file_bytes};
  }
  // What could not be read may be there again later: only its place in the index goes. Nobody else takes files away
  // meanwhile (names_mutex_), and the disk may be slow to answer.
  const bool keep_file = why.code() == StatusCode::IOError && !changed_on_disk(file.name, file.bytes);
  std::vector<FileToRemove> files;
  {
    Lock lock(mutex_);
    PartRecord* record = index_.find(key, part);
    if (record == nullptr || record->version != version || record->image != nullptr) return;
    if (keep_file) record->on_disk = false;
    ++(why.code() == StatusCode::NotFound ? stats_.lost_parts : stats_.corrupt_parts);
    stats_.last_error = why.message();
    drop(*record, files);
  }
  remove_files(files);
}

void StoreImpl::forget(const Key& key, Part part, std::uint64_t version, const Status& why) {
  // What did not answer is no worse for it, nor is what this process has no descriptors or memory for.
  for (const int number : {ETIMEDOUT, EMFILE, ENFILE, ENOMEM}) {
    if (why.error_number() == number) return;
  }
  ask_disk<bool>(
      [this, key, part, version, why] {
        forget_now(key, part, version, why);
        return true;
      },
      false);
}

Status StoreImpl::erase(std::span<const Key> keys, std::span<const Part> parts) {
  if (closed_) return {StatusCode::Closed, "the store is closed"};
  if (writer_ != nullptr && !scanned_) wait_for_scan(kRemovalWaits);
  const auto erase = [this, keys = std::vector<Key>(keys.begin(), keys.end()),
                      parts = std::vector<Part>(parts.begin(), parts.end())] { return erase_now(keys, parts); };
  return ask_disk<Status>(erase, no_answer(), static_cast<double>(keys.size()) * kSecondsARemoval);
}

Status StoreImpl::erase_now(const std::vector<Key>& keys, const std::vector<Part>& parts) {
  std::lock_guard names_lock(names_mutex_);
  std::vector<FileToRemove> files;
  {
    Lock lock(mutex_);
    for (const auto& key : keys) {
      for (const Part part : parts) {
        if (PartRecord* record = index_.find(key, part)) drop(*record, files);
      }
    }
  }
  return remove_files(files);
}

Status StoreImpl::clear() {
  if (closed_) return {StatusCode::Closed, "the store is closed"};
  if (writer_ != nullptr && !scanned_) wait_for_scan(kRemovalWaits);
  return ask_disk<Status>([this] { return clear_now(); }, no_answer(), kRemovalWaits);
}

Status StoreImpl::clear_now() {
  std::lock_guard names_lock(names_mutex_);
  std::vector<FileToRemove> files;
  {
    Lock lock(mutex_);
    for (PartRecord* record : index_.all()) drop(*record, files);
  }
  return remove_files(files);
}

Status StoreImpl::flush() {
  if (closed_) return {StatusCode::Closed, "the store is closed"};
  return write_all();
}

Status StoreImpl::write_all() {
  if (writer_ == nullptr) return Status::ok();
  ++insisting_;
  queue_unwritten();
  Status status = writer_->flush(options_.flush_wait_seconds, [this] { return directory_->signs_of_life(); });
  --insisting_;
  return status;
}

StoreStats StoreImpl::stats() const {
  Lock lock(mutex_);
  StoreStats stats = stats_;
  stats.parts = index_.part_count();
  stats.parts_in_ram = index_.ram_count();
  stats.ram_bytes = pool_->held();
  stats.ram_peak_bytes = pool_->peak();
  stats.queued_bytes = writer_ ? writer_->queued_bytes() : 0;
  stats.degraded = stats.degraded || patience_.overrun();
  stats.disk_bytes = directory_ ? directory_->used() : 0;
  return stats;
}

Status StoreImpl::close() {
  if (closed_.exchange(true)) return Status::ok();
  Status status;
  if (writer_) {
    status = write_all();
    const bool stuck = status.error_number() == ETIMEDOUT && !writer_->is_idle();
    const auto signs = [this] { return directory_->signs_of_life(); };
    if (!writer_->stop(stuck ? 0 : options_.flush_wait_seconds, signs)) {
      if (Status lost = give_up_writing(); !lost.is_ok()) status = std::move(lost);
    }
  }
  drop_late_jobs();
  Lock lock(mutex_);
  std::vector<FileToRemove> kept;
  for (PartRecord* record : index_.all()) drop(*record, kept);
  pool_->close();
  queue_pool_->close();
  return status;
}

Status StoreImpl::give_up_writing() {
  abandoned_ = true;
  const std::uint64_t lost = writer_->abandon();
  // Its thread may have been busy with other things.
  if (lost == 0) return Status::ok();
  Lock lock(mutex_);
  stats_.write_errors += lost;
  stats_.last_error = "the disk does not answer in time: " + std::to_string(lost) + " parts were not written";
  return {StatusCode::IOError, stats_.last_error, ETIMEDOUT};
}

bool StoreImpl::at_rest() const {
  return (writer_ == nullptr || writer_->ended()) && !patience_.overrun();
}

}  // namespace store
}  // namespace prefixcache
