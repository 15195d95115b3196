// store_gather.cpp: the restore line, from keys to filled arrays.
#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>

#include "gather/fault_guard.h"
#include "store/gather_job.h"
#include "store/store_impl.h"

namespace prefixcache::store {

namespace {

// What a slow disk reads in a second.
constexpr double kBytesASecond = 64 << 20;

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("[BlockStore::gather] " + what);
}

void check(const GatherRequest& request) {
  if (request.keys.empty()) refuse("no keys");
  if (request.row_lo < 0 || request.row_hi < request.row_lo) {
    refuse("rows " + std::to_string(request.row_lo) + ".." + std::to_string(request.row_hi) + " are no range");
  }
  if (request.capacity < request.row_hi - request.row_lo) {
    refuse("capacity " + std::to_string(request.capacity) + " is below the " +
           std::to_string(request.row_hi - request.row_lo) + " rows asked for");
  }
  if (request.capacity > std::numeric_limits<mlx::core::ShapeElem>::max()) {
    refuse("capacity " + std::to_string(request.capacity) + " is above what an array can have");
  }
}

}  // namespace

void StoreImpl::leave_late(const std::shared_ptr<GatherJob>& job) {
  Lock lock(mutex_);
  late_.push_back(job);
}

void StoreImpl::drop_late_jobs() {
  // Arrays are let go by threads of callers, never by those that read.
  std::vector<std::shared_ptr<GatherJob>> ended;
  Lock lock(mutex_);
  for (auto& job : late_) {
    if (job.use_count() == 1) ended.push_back(std::move(job));
  }
  std::erase(late_, nullptr);
  lock.unlock();
}

std::size_t StoreImpl::known_sources(GatherJob& job) {
  std::size_t first = job.sources.size();
  Lock lock(mutex_);
  for (std::size_t i = 0; i < job.sources.size(); ++i) {
    const PartRecord* record = index_.find(job.request.keys[i], job.request.part);
    if (record != nullptr) job.sources[i] = {record->image, record->file, record->version};
    if (record == nullptr || record->image == nullptr) first = std::min(first, i);
  }
  return first;
}

Gathered StoreImpl::gather(const GatherRequest& base) {
  check(base);
  const auto job = std::make_shared<GatherJob>();
  job->request = base;
  for (auto& key : job->request.keys) key = group_key(key, base.group);
  try {
    return gather_checked(job);
  } catch (const std::bad_alloc& e) {
    Gathered result;
    result.status = {StatusCode::Full, std::string("no memory: ") + e.what()};
    return result;
  }
}

Gathered StoreImpl::gather_checked(const std::shared_ptr<GatherJob>& job) {
  Gathered result;
  const auto fail = [&](std::size_t block, const Status& status) {
    result.status = status;
    result.good = block;
    return std::move(result);
  };
  if (closed_) return fail(0, {StatusCode::Closed, "the store is closed"});
  gather::ensure_fault_handler();
  drop_late_jobs();
  const GatherRequest& request = job->request;
  job->sources.resize(request.keys.size());
  job->found.resize(request.keys.size());
  const std::size_t in_ram = known_sources(*job);
  const bool from_disk = in_ram < request.keys.size();
  // Runs on another thread what reads files. False where that takes too long: then nothing of the job may be touched.
  const auto in_time = [&](auto read, double more) {
    const auto reads = [job, read] {
      read(*job);
      return true;
    };
    if (!from_disk) return reads();
    if (ask_disk<bool>(reads, false, more)) return true;
    leave_late(job);
    return false;
  };
  if (from_disk && directory_ == nullptr) {
    return fail(in_ram, {StatusCode::NotFound, "block " + request.keys[in_ram].hex() + " is not stored"});
  }
  if (from_disk && !in_time([this](GatherJob& own) { open_sources(own); }, 0)) return fail(in_ram, no_answer());
  // All that failed, not only the first: a later store must not take the others for stored.
  const auto& found = job->found;
  for (std::size_t i = found.size(); i-- > 0;) {
    if (!found[i].is_ok()) forget(request.keys[i], request.part, job->sources[i].version, found[i]);
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (!found[i].is_ok()) return fail(i, found[i]);
  }
  std::size_t bad_block = 0;
  if (Status status = GatherPlan::make(request, job->sources, job->plan, bad_block); !status.is_ok()) {
    if (status.code() == StatusCode::Corrupt) {
      // One key, two forms: a caller's mistake. The later ones go, so that the next store can mend the chain.
      const Part parts[] = {request.part};
      erase(std::span(request.keys).subspan(bad_block), parts);
      Lock lock(mutex_);
      stats_.corrupt_parts += request.keys.size() - bad_block;
      stats_.last_error = status.message();
    }
    return fail(bad_block, status);
  }
  const auto refused = device_ != nullptr && !from_disk ? job->plan.start(*device_) : std::nullopt;
  if (Status status = job->plan.allocate(); !status.is_ok()) return fail(0, status);
  double bytes = 0;
  for (std::size_t i = 0; i < job->sources.size(); ++i) {
    if (!job->sources[i].image) bytes += static_cast<double>(job->plan.bytes_of(i));
  }
  const auto copy = [this](GatherJob& own) { own.copied = own.plan.run(threads_, options_.verify); };
  if (!in_time(copy, bytes / kBytesASecond)) return fail(in_ram, no_answer());
  if (Status status = job->plan.finish(); !status.is_ok()) return fail(0, status);
  const auto& copied = job->copied;
  for (std::size_t i = copied.size(); i-- > 0;) {
    if (!copied[i].is_ok()) forget(request.keys[i], request.part, job->sources[i].version, copied[i]);
  }
  for (std::size_t i = 0; i < copied.size(); ++i) {
    if (!copied[i].is_ok()) return fail(i, copied[i]);
  }
  take_results(*job, result);
  if (refused) {
    Lock lock(mutex_);
    ++stats_.device_refusals;
    stats_.last_error = *refused;
  }
  return result;
}

void StoreImpl::take_results(GatherJob& job, Gathered& result) {
  for (std::size_t i = 0; i < job.sources.size(); ++i) {
    const bool in_ram = job.sources[i].image != nullptr;
    (in_ram ? result.ram_bytes : result.disk_bytes) += job.plan.bytes_of(i);
    ++(in_ram ? result.ram_blocks : result.disk_blocks);
  }
  result.good = job.sources.size();
  result.meta = job.sources.back().header().meta;
  result.slots = job.plan.take_results();
  const GatherRequest& request = job.request;
  Lock lock(mutex_);
  stats_.gathered_ram_bytes += result.ram_bytes;
  stats_.gathered_disk_bytes += result.disk_bytes;
  stats_.gathered_device_bytes += job.plan.device_bytes();
  // Touching the last block of `kv` reaches all before it.
  const std::size_t first = request.part == Part::kv ? request.keys.size() - 1 : 0;
  for (std::size_t i = first; i < request.keys.size(); ++i) {
    if (PartRecord* record = index_.find(request.keys[i], request.part)) use(*record);
  }
}

Gathered StoreImpl::load(const Key& key, Part part) {
  Source source;
  if (closed_) {
    Gathered result;
    result.status = {StatusCode::Closed, "the store is closed"};
    return result;
  }
  if (Status status = source_of(key, part, source); !status.is_ok()) {
    Gathered result;
    result.status = status;
    forget(key, part, source.version, status);
    return result;
  }
  const auto& header = source.header();
  GatherRequest request;
  request.keys = {key};
  request.part = part;
  request.row_lo = header.row_lo;
  request.row_hi = header.row_hi;
  request.capacity = header.row_hi - header.row_lo;
  return gather(request);
}

}  // namespace prefixcache::store
