// store_write.cpp: from images to files, on the writer's thread.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <utility>

#include "hash/checksum.h"
#include "store/store_impl.h"

namespace prefixcache::store {

namespace {

// After a failure the disk is left alone for so long, twice as long after each further one.
constexpr double kFirstRest = 0.25;
constexpr double kLongestRest = 5;
// Files of others' that were used since we looked: so many are passed over for one that goes.
constexpr int kMostPassedOver = 64;
constexpr double kForever = std::numeric_limits<double>::infinity();

layout::NameInfo file_name_of(const layout::PartHeader& header) {
  return {header.key, layout::parent_prefix(header.parent), header.depth, header.part};
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

bool StoreImpl::disk_rests() const {
  return insisting_ == 0 && steady_seconds() < rest_until_;
}

double StoreImpl::seconds_of_rest() const {
  return std::max(0.0, rest_until_ - steady_seconds());
}

void StoreImpl::disk_failed(const Status& status) {
  {
    Lock lock(mutex_);
    rest_seconds_ = stats_.degraded ? std::min(2 * rest_seconds_, kLongestRest) : kFirstRest;
    rest_until_ = steady_seconds() + rest_seconds_;
    stats_.degraded = true;
    trouble_ = status;
    stats_.last_error = status.message();
  }
  if (writer_ != nullptr) writer_->poke();
}

void StoreImpl::disk_works() {
  bool was_degraded = false;
  {
    Lock lock(mutex_);
    was_degraded = std::exchange(stats_.degraded, false);
    rest_until_ = 0;
  }
  // What was left in RAM meanwhile.
  if (was_degraded && options_.write != WritePolicy::back) queue_unwritten();
}

Status StoreImpl::write_image(const std::shared_ptr<Image>& image) {
  {
    Lock lock(mutex_);
    PartRecord* record = index_.find(image->header.key, image->header.part);
    // Erased before its turn came.
    if (record == nullptr || record->image != image) return Status::ok();
    if (disk_rests()) {
      const bool lost = !record->in_ram_order;
      not_written(*record, true);
      if (!lost) return Status::ok();
      ++stats_.write_errors;
      return trouble_;
    }
  }
  Status status;
  std::string temp;
  std::uint64_t file_bytes = 0;
  try {
    status = write_file(*image, temp, file_bytes);
  } catch (const std::exception& e) {
    // No memory, say. On this thread it would end the process.
    status = {StatusCode::IOError, std::string("cannot write a part: ") + e.what(), ENOMEM};
  }
  if (abandoned_) {
    // The store was closed without it: by now this file may be another store's to write.
    if (status.is_ok()) directory_->discard(temp, file_bytes);
    return status;
  }
  {
    std::lock_guard names_lock(names_mutex_);
    if (status.is_ok()) {
      status = directory_->publish(temp, file_name_of(image->header), file_bytes);
    }
    remove_files(finish_write(image, status, file_bytes));
  }
  if (status.is_ok()) disk_works();
  // A bound that was reached is no fault of the disk.
  if (!status.is_ok() && status.code() != StatusCode::Full) disk_failed(status);
  pool_->notify();
  return status;
}

Status StoreImpl::write_file(Image& image, std::string& temp, std::uint64_t& file_bytes) {
  const auto data = image.data();
  for (auto& tensor : image.header.tensors) tensor.digest = hash::xxh3_64(data.subspan(tensor.offset, tensor.nbytes));
  const std::string header = layout::encode_header(image.header);
  file_bytes = header.size() + data.size();
  if (Status status = make_disk_room(image, file_bytes); !status.is_ok()) return status;
  const std::span<const std::uint8_t> pieces[] = {{reinterpret_cast<const std::uint8_t*>(header.data()), header.size()},
                                                  data};
  Status status = directory_->write(file_name_of(image.header), pieces, temp);
  if (!status.is_ok()) directory_->release(file_bytes);
  return status;
}

Status StoreImpl::make_disk_room(const Image& newcomer, std::uint64_t bytes) {
  const Status full{StatusCode::Full, "a part of " + std::to_string(bytes) + " bytes at depth " +
                                          std::to_string(newcomer.header.depth) + " does not fit below disk_bytes " +
                                          std::to_string(options_.disk_bytes)};
  if (bytes > options_.disk_bytes) return full;
  for (bool counted = false;;) {
    if (abandoned_) return {StatusCode::IOError, "the store was closed", ETIMEDOUT};
    bool granted = false;
    Status status = directory_->reserve(bytes, options_.disk_bytes, granted);
    if (granted) return Status::ok();
    // Nobody has counted yet, or files may have gone without a word: count before anything is evicted for nothing.
    if (!counted && (status.code() == StatusCode::NotFound || (status.is_ok() && count_is_due(CountFor::evictions)))) {
      counted = true;
      if (status = recount(); status.is_ok()) continue;
    }
    if (!status.is_ok()) return {StatusCode::IOError, status.message(), status.error_number()};
    if (evict_one_from_disk(&newcomer, status)) continue;
    if (!status.is_ok()) return status;
    // Others may have written what can go.
    if (counted || !count_is_due(CountFor::lack)) return full;
    counted = true;
    if (status = recount(); !status.is_ok()) return status;
  }
}

bool StoreImpl::evict_one_from_disk(const Image* newcomer, Status& status) {
  for (int passed_over = 0;;) {
    std::lock_guard names_lock(names_mutex_);
    layout::NameInfo name;
    double used_at = kForever;
    double dated_at = 0;
    {
      Lock lock(mutex_);
      if (const PartRecord* victim = disk_victim(newcomer)) {
        name = name_of(*victim);
        used_at = victim->used_at;
        dated_at = victim->dated_at;
      }
    }
    if (directory_->evict_foreign(used_at)) return true;
    if (used_at == kForever) return false;
    FileInfo info;
    const Status found = env_.stat(directory_->path_of(name), info);
    std::vector<FileToRemove> files;
    {
      Lock lock(mutex_);
      PartRecord* victim = index_.find(name.key, name.part);
      if (victim == nullptr || !victim->on_disk) continue;
      // Another process has used it.
      if (found.is_ok() && info.modified > std::max(dated_at, used_at) + 1 && ++passed_over <= kMostPassedOver) {
        victim->dated_at = info.modified;
        index_.touch(*victim, info.modified);
        continue;
      }
      ++stats_.evicted_disk_parts;
      files.push_back({name, victim->file_bytes});
      leave_disk(*victim);
    }
    status = remove_files(files);
    return status.is_ok();
  }
}

PartRecord* StoreImpl::disk_victim(const Image* newcomer) {
  const auto& order = index_.disk_order();
  if (newcomer != nullptr) return victim_for(*newcomer, order, false);
  const auto found = std::find_if(order.rbegin(), order.rend(), [](const auto* record) { return !record->waiting; });
  return found == order.rend() ? nullptr : *found;
}

void StoreImpl::leave_disk(PartRecord& record) {
  record.on_disk = false;
  record.file.reset();
  index_.remove_from_disk(record);
  if (record.image == nullptr) index_.remove(record);
}

void StoreImpl::not_written(PartRecord& record, bool try_again) {
  record.waiting = record.leaving = false;
  if (!record.in_ram_order) {
    record.forget_image();
  } else if (try_again) {
    record.unwritten = true;
  }
  if (!record.image && !record.on_disk) index_.remove(record);
}

std::vector<StoreImpl::FileToRemove> StoreImpl::finish_write(const std::shared_ptr<Image>& image, const Status& status,
                                                             std::uint64_t file_bytes) {
  std::vector<FileToRemove> files;
  Lock lock(mutex_);
  const auto& header = image->header;
  PartRecord* record = index_.find(header.key, header.part);
  const bool wanted = record != nullptr && record->image == image;
  if (!status.is_ok()) {
    ++(status.code() == StatusCode::Full ? stats_.left_out_parts : stats_.write_errors);
    stats_.last_error = status.message();
    if (wanted) not_written(*record, status.code() != StatusCode::Full);
    return files;
  }
  ++stats_.written_parts;
  stats_.written_bytes += file_bytes;
  if (!wanted && record != nullptr && record->on_disk) {
    // A fuller image came meanwhile, and is still to be written. The file that it knew of is now this one.
    record->file_bytes = file_bytes;
    return files;
  }
  if (!wanted) {
    // Erased while it was being written. If it was put again meanwhile, that write is still to come. Of a store that
    // was closed without it the file is as good as any.
    if (!abandoned_) files.push_back({file_name_of(header), file_bytes});
    return files;
  }
  record->waiting = record->leaving = false;
  record->on_disk = true;
  record->file_is_older = false;
  record->file_bytes = file_bytes;
  record->dated_at = env_.now();
  record->seen_in_scan = scan_number_;
  index_.add_to_disk(*record);
  if (!record->in_ram_order) record->forget_image();
  return files;
}

}  // namespace prefixcache::store
