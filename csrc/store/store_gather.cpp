// store_gather.cpp: the restore line, from keys to filled arrays.
#include <limits>
#include <new>
#include <stdexcept>

#include "gather/fault_guard.h"
#include "store/gather_plan.h"
#include "store/store_impl.h"

namespace prefixcache::store {

namespace {

// Each open part is a mapping; systems allow some tens of thousands for a process.
constexpr std::size_t kMostOpenFiles = 4096;

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

Status StoreImpl::source_of(const Key& key, Part part, Source& out) {
  {
    Lock lock(mutex_);
    PartRecord* record = index_.find(key, part);
    if (record == nullptr) return {StatusCode::NotFound, "block " + key.hex() + " is not stored"};
    out.image = record->image;
    out.file = record->file;
    out.version = record->version;
  }
  if (out.image || out.file) return Status::ok();
  return open_file(key, part, out);
}

Status StoreImpl::open_file(const Key& key, Part part, Source& out) {
  layout::NameInfo name;
  {
    Lock lock(mutex_);
    PartRecord* record = index_.find(key, part);
    out.version = record == nullptr ? 0 : record->version;
    if (record == nullptr || !record->on_disk) return {StatusCode::NotFound, "block " + key.hex() + " is not stored"};
    name = name_of(*record);
  }
  if (Status status = PartFile::open(env_, directory_->path_of(name), name, out.file); !status.is_ok()) return status;
  Lock lock(mutex_);
  PartRecord* record = index_.find(key, part);
  // Erased or replaced meanwhile: good for this reader, but nobody else's business.
  if (record == nullptr || record->version != out.version) return Status::ok();
  const auto& header = out.file->header();
  record->file = out.file;
  record->row_lo = header.row_lo;
  record->row_hi = header.row_hi;
  index_.set_parent(*record->entry, header.parent);
  if (record->entry->text == nullptr) {
    record->entry->text = std::make_shared<BlockText>(BlockText{header.tokens, header.content});
  }
  ++open_files_;
  limit_open_files();
  return Status::ok();
}

void StoreImpl::limit_open_files() {
  if (open_files_ <= kMostOpenFiles) return;
  // Those in use stay mapped through the gathers that hold them.
  open_files_ = 0;
  std::size_t seen = 0;
  for (PartRecord* record : index_.disk_order()) {
    if (record->file == nullptr) continue;
    if (++seen > kMostOpenFiles / 2) record->file.reset();
    open_files_ += record->file != nullptr ? 1 : 0;
  }
}

Gathered StoreImpl::gather(const GatherRequest& base) {
  check(base);
  GatherRequest request = base;
  for (auto& key : request.keys) key = group_key(key, base.group);
  try {
    return gather_checked(request);
  } catch (const std::bad_alloc& e) {
    Gathered result;
    result.status = {StatusCode::Full, std::string("no memory: ") + e.what()};
    return result;
  }
}

Gathered StoreImpl::gather_checked(const GatherRequest& request) {
  Gathered result;
  if (closed_) {
    result.status = {StatusCode::Closed, "the store is closed"};
    return result;
  }
  gather::ensure_fault_handler();
  // Files that were not read yet are opened side by side.
  std::vector<Source> sources(request.keys.size());
  std::vector<Status> found(request.keys.size());
  threads_.parallel_for(sources.size(),
                        [&](std::size_t i) { found[i] = source_of(request.keys[i], request.part, sources[i]); });
  const auto fail = [&](std::size_t block, const Status& status) {
    result.status = status;
    result.good = block;
    return std::move(result);
  };
  // All that failed, not only the first: a later store must not take the others for stored.
  for (std::size_t i = found.size(); i-- > 0;) {
    if (!found[i].is_ok()) forget(request.keys[i], request.part, sources[i].version, found[i]);
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (!found[i].is_ok()) return fail(i, found[i]);
  }
  GatherPlan plan;
  std::size_t bad_block = 0;
  if (Status status = GatherPlan::make(request, sources, plan, bad_block); !status.is_ok()) {
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
  if (Status status = plan.allocate(); !status.is_ok()) return fail(0, status);
  const std::vector<Status> copied = plan.run(threads_, options_.verify);
  for (std::size_t i = copied.size(); i-- > 0;) {
    if (!copied[i].is_ok()) forget(request.keys[i], request.part, sources[i].version, copied[i]);
  }
  for (std::size_t i = 0; i < copied.size(); ++i) {
    if (!copied[i].is_ok()) return fail(i, copied[i]);
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    (sources[i].image ? result.ram_bytes : result.disk_bytes) += plan.bytes_of(i);
    ++(sources[i].image ? result.ram_blocks : result.disk_blocks);
  }
  result.good = sources.size();
  result.meta = sources.back().header().meta;
  result.slots = plan.take_results();
  Lock lock(mutex_);
  stats_.gathered_ram_bytes += result.ram_bytes;
  stats_.gathered_disk_bytes += result.disk_bytes;
  // Touching the last block of `kv` reaches all before it.
  const std::size_t first = request.part == Part::kv ? request.keys.size() - 1 : 0;
  for (std::size_t i = first; i < request.keys.size(); ++i) {
    if (PartRecord* record = index_.find(request.keys[i], request.part)) index_.touch(*record);
  }
  return result;
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
