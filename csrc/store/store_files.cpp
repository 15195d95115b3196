// store_files.cpp: part files of the store, from their names to mappings.
#include <algorithm>
#include <cerrno>

#include "store/gather_job.h"
#include "store/store_impl.h"

namespace prefixcache::store {

namespace {

// Each open part is a mapping; systems allow some tens of thousands for a process.
constexpr std::size_t kMostOpenFiles = 4096;
// Each has a descriptor until it is mapped.
constexpr std::size_t kOpenedAtOnce = 16;

bool lacks_descriptors(const Status& status) {
  return status.error_number() == EMFILE || status.error_number() == ENFILE;
}

}  // namespace

// A file whose header was asked for, but not read.
struct StoreImpl::Opening {
  layout::NameInfo name;
  std::string path;
  std::unique_ptr<ReadableFile> file;
};

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
  using Answer = std::pair<Status, Source>;
  const auto open = [this, key, part] {
    Answer answer;
    answer.first = open_file_now(key, part, answer.second);
    return answer;
  };
  Answer answer = ask_disk<Answer>(open, {no_answer(), {}});
  out = std::move(answer.second);
  return answer.first;
}

Status StoreImpl::open_file_now(const Key& key, Part part, Source& out) {
  Opening opening;
  Status status = begin_open(key, part, opening, out);
  return opening.file ? end_open(opening, out) : status;
}

Status StoreImpl::begin_open(const Key& key, Part part, Opening& opening, Source& out) {
  {
    Lock lock(mutex_);
    PartRecord* record = index_.find(key, part);
    if (record == nullptr) return {StatusCode::NotFound, "block " + key.hex() + " is not stored"};
    out.version = record->version;
    if (record->image != nullptr) {
      // Put since it was looked up.
      out.image = record->image;
      return Status::ok();
    }
    opening.name = name_of(*record);
  }
  if (Status status = directory_->check_way(opening.name); !status.is_ok()) return status;
  opening.path = directory_->path_of(opening.name);
  std::unique_ptr<ReadableFile> file;
  if (Status status = env_.open(opening.path, file); !status.is_ok()) return status;
  file->will_read(0, kHeaderRead);
  opening.file = std::move(file);
  return Status::ok();
}

Status StoreImpl::end_open(Opening& opening, Source& out) {
  Status status = PartFile::open(std::move(opening.file), opening.path, opening.name, out.file);
  if (!status.is_ok()) return status;
  Lock lock(mutex_);
  PartRecord* record = index_.find(opening.name.key, opening.name.part);
  // Erased or replaced meanwhile: good for this reader, but nobody else's business.
  if (record == nullptr || record->version != out.version) return Status::ok();
  const auto& header = out.file->header();
  record->file = out.file;
  record->row_lo = header.row_lo;
  record->row_hi = header.row_hi;
  index_.set_parent(*record->entry, header.parent);
  index_.set_text(*record->entry, {header.tokens, header.content});
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

bool StoreImpl::has_file(const Key& key, Part part) {
  layout::NameInfo name;
  {
    Lock lock(mutex_);
    const PartRecord* record = index_.find(key, part);
    if (record == nullptr) return false;
    name = name_of(*record);
  }
  FileInfo info;
  return env_.stat(directory_->path_of(name), info).code() != StatusCode::NotFound;
}

void StoreImpl::open_sources(GatherJob& job) {
  const auto& keys = job.request.keys;
  const Part part = job.request.part;
  std::vector<std::size_t> closed;
  std::vector<std::size_t> open;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (job.sources[i].image == nullptr) (job.sources[i].file ? open : closed).push_back(i);
  }
  // Side by side. All headers are asked for before one is waited for: a disk's answer takes as long for many as for
  // one.
  std::vector<Opening> openings(std::min(closed.size(), kOpenedAtOnce));
  for (std::size_t first = 0; first < closed.size(); first += kOpenedAtOnce) {
    const std::size_t count = std::min(closed.size() - first, kOpenedAtOnce);
    threads_.parallel_for(count, [&](std::size_t i) {
      const std::size_t block = closed[first + i];
      openings[i] = {};
      job.found[block] = begin_open(keys[block], part, openings[i], job.sources[block]);
    });
    threads_.parallel_for(count, [&](std::size_t i) {
      const std::size_t block = closed[first + i];
      if (openings[i].file) job.found[block] = end_open(openings[i], job.sources[block]);
    });
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t block = closed[first + i];
      // One at a time, as mapped files need none.
      if (lacks_descriptors(job.found[block])) job.found[block] = open_file_now(keys[block], part, job.sources[block]);
    }
  }
  // Others may have removed them. The deepest block goes first: while it is there, so are those before it.
  if (open.empty() || has_file(keys[open.back()], part)) return;
  for (const std::size_t i : open) {
    if (!has_file(keys[i], part)) job.found[i] = {StatusCode::NotFound, "the file of " + keys[i].hex() + " is gone"};
  }
}

}  // namespace prefixcache::store
