// store_scan.cpp: what the directory holds, and what the writer's thread does when nothing waits to be written.
#include <algorithm>
#include <chrono>

#include "store/store_impl.h"

namespace prefixcache::store {

namespace {

using Clock = std::chrono::steady_clock;

// A hit dates its files, at most once in so many seconds each.
constexpr double kDateEvery = 60;
// Between two counts of a directory lie at least so many times what the last one took.
constexpr double kShareOfTime = 20;
// What others wrote is looked for at most so often.
constexpr double kLookEvery = 0.5;
constexpr double kCountEvery = 600;
constexpr double kCountBeforeEvictions = 30;
constexpr double kShortCount = 0.02;
// Entries that are merged at a time: callers wait for the mutex no longer than that takes.
constexpr std::size_t kChunk = 128;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

double StoreImpl::idle() {
  double next = kCountEvery;
  try {
    if (!abandoned_) date_files();
    if (closed_) return next;
    if (!scanned_) {
      look_for_the_first_time();
    } else if (rest_until_ > 0) {
      if (!disk_rests()) try_again();
    } else if (count_is_due(CountFor::order)) {
      if (const Status status = recount(); !status.is_ok()) disk_failed(status);
    }
    if (look_wanted_ && rest_until_ == 0) look();
    if (rest_until_ > 0) next = std::min(next, seconds_of_rest() + 1e-3);
    if (look_wanted_) next = std::min(next, std::max(kLookEvery, kShareOfTime * look_seconds_));
    if (directory_->count_wanted()) next = std::min(next, std::max(0.05, kShareOfTime * count_seconds_));
  } catch (const std::exception& e) {
    // No memory, say. On this thread it would end the process.
    Lock lock(mutex_);
    stats_.last_error = e.what();
  }
  return next;
}

void StoreImpl::look_for_others() {
  if (writer_ != nullptr && !look_wanted_.exchange(true)) writer_->poke();
}

void StoreImpl::look() {
  const auto start = Clock::now();
  if (seconds_since(looked_at_) < std::max(kLookEvery, kShareOfTime * look_seconds_)) return;
  look_wanted_ = false;
  looked_at_ = start;
  if (!directory_->others_wrote()) return;
  const std::uint64_t removals = removals_;
  std::vector<FoundPart> found;
  if (directory_->look(found).is_ok()) merge(found, removals);
  looked_at_ = Clock::now();
  look_seconds_ = std::chrono::duration<double>(looked_at_ - start).count();
}

void StoreImpl::look_for_the_first_time() {
  Status status = ready_ ? recount() : Status{StatusCode::IOError, ""};
  if (ready_ && !status.is_ok()) disk_failed(status);
  Lock lock(mutex_);
  scanned_ = true;
  lock.unlock();
  scan_ended_.notify_all();
}

void StoreImpl::wait_for_scan(double seconds) {
  Lock lock(mutex_);
  scan_ended_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return scanned_ || closed_; });
}

void StoreImpl::try_again() {
  Status status = directory_->prepare();
  if (status.is_ok()) status = directory_->probe();
  if (status.is_ok()) status = recount();
  if (!status.is_ok()) {
    disk_failed(status);
    return;
  }
  disk_works();
}

bool StoreImpl::count_is_due(CountFor reason) const {
  const double age = seconds_since(counted_at_);
  const double least = kShareOfTime * count_seconds_;
  if (reason == CountFor::lack) return age >= least || count_seconds_ < kShortCount;
  if (directory_->count_wanted()) return age >= std::max(0.05, least);
  return age >= std::max(reason == CountFor::evictions ? kCountBeforeEvictions : kCountEvery, least);
}

Status StoreImpl::recount() {
  const auto start = Clock::now();
  const std::uint64_t removals = removals_;
  std::vector<FoundPart> found;
  std::unique_lock names_lock(names_mutex_, std::defer_lock);
  // What is removed during a count may be in its sum. A short one can keep others of this process waiting.
  if (scanned_ && count_seconds_ < kShortCount) names_lock.lock();
  Status status = directory_->scan(found);
  if (status.code() == StatusCode::NotFound) {
    // Somebody removed the tree.
    status = directory_->prepare();
    if (status.is_ok()) status = directory_->scan(found);
  }
  if (names_lock.owns_lock()) names_lock.unlock();
  if (!status.is_ok()) return status;
  {
    Lock lock(mutex_);
    ++scan_number_;
  }
  merge(found, removals);
  drop_vanished();
  counted_at_ = Clock::now();
  count_seconds_ = std::chrono::duration<double>(counted_at_ - start).count();
  while (!abandoned_ && directory_->used() > options_.disk_bytes && evict_one_from_disk(nullptr, status)) {
  }
  return status;
}

void StoreImpl::merge(const std::vector<FoundPart>& found, std::uint64_t removals) {
  std::unordered_map<std::uint64_t, const Key*> by_prefix;
  for (const auto& part : found) by_prefix[layout::parent_prefix(part.name.key)] = &part.name.key;
  const double last_count = last_count_;
  last_count_ = env_.now();
  // Used or written by others since we looked last; oldest first.
  std::vector<std::size_t> fresh;
  for (std::size_t end = found.size(); end > 0;) {
    const std::size_t begin = end - std::min(end, kChunk);
    std::lock_guard names_lock(names_mutex_);
    // What was removed here since the scan must not come back.
    std::vector<bool> gone(end - begin, false);
    FileInfo info;
    for (std::size_t i = begin; i < end && removals != removals_; ++i) {
      gone[i - begin] = !env_.stat(found[i].path, info).is_ok();
    }
    Lock lock(mutex_);
    // The newest first, so that each goes behind what is there.
    for (; end > begin; --end) {
      const FoundPart& part = found[end - 1];
      if (gone[end - 1 - begin]) continue;
      const auto parent = by_prefix.find(part.name.parent_prefix);
      if (merge_one(part, parent == by_prefix.end() ? nullptr : parent->second, last_count)) fresh.push_back(end - 1);
    }
  }
  while (!fresh.empty()) {
    Lock lock(mutex_);
    for (std::size_t i = 0; i < kChunk && !fresh.empty(); ++i) {
      const FoundPart& part = found[fresh.back()];
      fresh.pop_back();
      if (PartRecord* record = index_.find(part.name.key, part.name.part)) index_.touch(*record, part.modified);
    }
  }
}

bool StoreImpl::merge_one(const FoundPart& part, const Key* parent, double last_count) {
  // The newest come first, so each is older than those before it.
  const bool is_old = last_count == 0 || part.modified <= last_count;
  Entry& entry = index_.entry(part.name.key, part.name.parent_prefix, part.name.depth, is_old);
  if (parent != nullptr && !entry.parent_known) index_.set_parent(entry, *parent);
  PartRecord& record = index_.part(entry, part.name.part);
  record.seen_in_scan = scan_number_;
  const bool is_new = !record.on_disk;
  // Under way: the writer will say so.
  if (is_new && record.image != nullptr && (record.waiting || record.unwritten)) return false;
  record.on_disk = true;
  record.file_bytes = part.bytes;
  record.dated_at = std::max(record.dated_at, part.dated);
  const bool is_fresh = is_new ? part.modified > last_count : part.modified > record.used_at + 1;
  record.used_at = std::max(record.used_at, part.modified);
  index_.add_to_disk_last(record);
  return is_fresh && last_count > 0;
}

void StoreImpl::drop_vanished() {
  std::vector<layout::NameInfo> vanished;
  for (std::size_t shard = 0; shard < Index::kShards; ++shard) {
    Lock lock(mutex_);
    index_.for_each(shard, [&](const PartRecord& record) {
      if (record.on_disk && record.seen_in_scan != scan_number_) vanished.push_back(name_of(record));
    });
  }
  for (const auto& name : vanished) {
    directory_->is_alive();
    std::lock_guard names_lock(names_mutex_);
    FileInfo info;
    if (env_.stat(directory_->path_of(name), info).code() != StatusCode::NotFound) continue;
    Lock lock(mutex_);
    PartRecord* record = index_.find(name.key, name.part);
    if (record == nullptr || !record->on_disk) continue;
    ++stats_.lost_parts;
    leave_disk(*record);
  }
}

void StoreImpl::use(PartRecord& record) {
  std::vector<PartRecord*> to_date;
  const double now = env_.now();
  index_.use(record, now, kDateEvery, to_date);
  if (to_date.empty() || writer_ == nullptr) return;
  for (PartRecord* old : to_date) {
    old->dated_at = now;
    to_date_.emplace_back(name_of(*old), now);
  }
  writer_->poke();
}

void StoreImpl::date_files() {
  std::vector<std::pair<layout::NameInfo, double>> names;
  {
    Lock lock(mutex_);
    names.swap(to_date_);
  }
  if (disk_rests()) return;
  for (const auto& [name, time] : names) directory_->date(name, time);
}

}  // namespace prefixcache::store
