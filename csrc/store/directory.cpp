#include "store/directory.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <random>
#include <unordered_map>

namespace prefixcache::store {

namespace {

constexpr std::string_view kVersionFolder = "/v1";
constexpr std::string_view kUsageFile = ".usage";
// Times of directories are no finer than this on any file system.
constexpr double kSettled = 2.5;
constexpr std::string_view kPartEnding = ".safetensors";
constexpr std::string_view kTempPrefix = ".tmp-";

std::string random_tag() {
  std::random_device device;
  return std::to_string(device()) + "-" + std::to_string(device()) + "-";
}

// Adds the bytes of regular files, but for the one of this name.
void add_files(const std::vector<DirEntry>& entries, std::string_view except, std::uint64_t& bytes) {
  for (const auto& entry : entries) {
    if (entry.info.is_regular && entry.name != except) bytes += entry.info.size;
  }
}

}  // namespace

void sort_by_recency(std::vector<FoundPart>& parts) {
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.name.depth > b.name.depth; });
  std::unordered_map<std::uint64_t, double> newest;  // by the first bytes of a key
  for (auto& part : parts) {
    // The rows of a window and states are needed by what follows them for a while only.
    if (part.name.part != Part::kv) continue;
    auto& own = newest[layout::parent_prefix(part.name.key)];
    own = std::max(own, part.modified);
    part.modified = own;
    auto& parents = newest[part.name.parent_prefix];
    parents = std::max(parents, part.modified);
  }
  std::stable_sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.modified < b.modified; });
}

Directory::Directory(Env& env, std::string root, const std::string& name_space, double temp_grace_seconds)
    : env_(env),
      root_(std::move(root)),
      versioned_(root_ + std::string(kVersionFolder)),
      own_(versioned_ + "/" + name_space),
      temp_grace_seconds_(temp_grace_seconds),
      usage_(env, versioned_ + "/" + std::string(kUsageFile)),
      temp_tag_(random_tag()) {}

Status Directory::prepare() {
  // Asked before anything is made in it. What cannot be asked (missing, say) shows when it is made.
  FileInfo info;
  if (env_.stat(root_, info).is_ok()) {
    if (Status status = env_.check_private(root_); !status.is_ok()) return status;
  }
  for (const std::string& path : {versioned_, own_}) {
    const Status status = check_folder(path);
    if (!status.is_ok() && status.code() != StatusCode::NotFound) return status;
  }
  if (Status status = env_.make_directories(own_); !status.is_ok()) return status;
  for (const std::string& path : {versioned_, own_}) {
    if (Status status = check_folder(path); !status.is_ok()) return status;
  }
  for (const std::string& path : {root_, versioned_, own_}) {
    if (Status status = env_.check_private(path); !status.is_ok()) return status;
  }
  return Status::ok();
}

Status Directory::check_folder(const std::string& path) {
  FileInfo info;
  Status status = env_.stat(path, info);
  if (status.is_ok() && !info.is_directory) {
    return {StatusCode::IOError, path + " is a link or a file, not a directory", ENOTDIR};
  }
  return status;
}

std::string Directory::folder_of(const Key& key) const {
  return own_ + "/" + key.hex().substr(0, 2);
}

std::string Directory::path_of(const layout::NameInfo& name) const {
  return folder_of(name.key) + "/" + layout::file_name(name);
}

Status Directory::check_way(const layout::NameInfo& name) {
  return check_way_to(folder_of(name.key));
}

Status Directory::check_way_to(const std::string& path) {
  for (std::size_t end = versioned_.size();; end = path.find('/', end + 1)) {
    if (Status status = check_folder(path.substr(0, end)); !status.is_ok()) return status;
    if (end >= path.size()) return Status::ok();
  }
}

Status Directory::scan(std::vector<FoundPart>& parts) {
  std::lock_guard scanning(scan_mutex_);
  parts.clear();
  scanned_bytes_ = 0;
  scan_foreign_.clear();
  count_wanted_ = false;
  if (Status status = check_folder(versioned_); !status.is_ok()) return status;
  if (Status status = usage_.begin_count(); !status.is_ok()) return status;
  std::vector<DirEntry> entries;
  if (env_.list(root_, entries).is_ok()) add_files(entries, "", scanned_bytes_);
  if (Status status = env_.list(versioned_, entries); !status.is_ok()) return status;
  add_files(entries, kUsageFile, scanned_bytes_);
  for (const auto& space : entries) {
    const std::string path = versioned_ + "/" + space.name;
    if (!space.info.is_directory) continue;
    if (Status status = scan_namespace(path, path == own_, parts); !status.is_ok()) return status;
  }
  if (Status status = usage_.end_count(scanned_bytes_); !status.is_ok()) return status;
  sort_by_recency(scan_foreign_);
  sort_by_recency(parts);
  std::lock_guard lock(foreign_mutex_);
  foreign_.assign(std::make_move_iterator(scan_foreign_.begin()), std::make_move_iterator(scan_foreign_.end()));
  scan_foreign_.clear();
  return Status::ok();
}

Status Directory::scan_namespace(const std::string& path, bool own, std::vector<FoundPart>& parts) {
  std::vector<DirEntry> folders;
  std::vector<DirEntry> files;
  // Others may remove folders meanwhile.
  const auto failed = [](const Status& status) { return !status.is_ok() && status.code() != StatusCode::NotFound; };
  if (Status status = env_.list(path, folders); failed(status)) return status;
  for (const auto& folder : folders) {
    is_alive();
    // A probe that was killed.
    if (folder.info.is_regular && !remove_leftover(path, folder)) scanned_bytes_ += folder.info.size;
    if (!folder.info.is_directory) continue;
    if (own) changed(folder);
    const std::string below = path + "/" + folder.name;
    files.clear();
    if (Status status = env_.list(below, files); failed(status)) return status;
    for (const auto& file : files) scan_file(below, file, own, parts);
  }
  return Status::ok();
}

bool Directory::remove_leftover(const std::string& folder, const DirEntry& file) {
  // One of the far future says as little of a write under way: a clock was wrong.
  const double age = std::abs(env_.now() - file.info.modified);
  if (!file.name.starts_with(kTempPrefix) || age <= temp_grace_seconds_) return false;
  env_.remove(folder + "/" + file.name);
  return true;
}

void Directory::scan_file(const std::string& folder, const DirEntry& file, bool own, std::vector<FoundPart>& parts) {
  if (!file.info.is_regular || remove_leftover(folder, file)) return;
  FoundPart part;
  part.path = folder + "/" + file.name;
  scanned_bytes_ += file.info.size;
  // What is no block, or lies where it does not belong, is counted and left alone.
  if (!file.name.ends_with(kPartEnding)) return;
  const bool named = layout::parse_file_name(file.name, part.name);
  if (named && !folder.ends_with("/" + part.name.key.hex().substr(0, 2))) return;
  part.bytes = file.info.size;
  part.dated = file.info.modified;
  // What no store reads goes before all others.
  part.modified = named ? part.dated : 0;
  (own && named ? parts : scan_foreign_).push_back(std::move(part));
}

bool Directory::changed(const DirEntry& folder) {
  // A change of this very moment may not show in the time: such a folder is listed again.
  const bool settled = env_.now() - folder.info.modified > kSettled;
  double& before = listed_[folder.name];
  const bool same = before == folder.info.modified;
  before = settled ? folder.info.modified : 0;
  return !same;
}

Status Directory::look(std::vector<FoundPart>& parts) {
  std::lock_guard scanning(scan_mutex_);
  parts.clear();
  scan_foreign_.clear();
  std::vector<DirEntry> folders;
  std::vector<DirEntry> files;
  if (Status status = check_way_to(own_); !status.is_ok()) return status;
  if (Status status = env_.list(own_, folders); !status.is_ok()) return status;
  for (const auto& folder : folders) {
    const std::string below = own_ + "/" + folder.name;
    if (!folder.info.is_directory || !changed(folder)) continue;
    if (!env_.list(below, files).is_ok()) {
      listed_.erase(folder.name);
      continue;
    }
    for (const auto& file : files) scan_file(below, file, true, parts);
  }
  sort_by_recency(parts);
  return Status::ok();
}

Status Directory::reserve(std::uint64_t bytes, std::uint64_t limit, bool& granted) {
  return usage_.reserve(bytes, limit, granted);
}

Status Directory::write(const layout::NameInfo& name, std::span<const std::span<const std::uint8_t>> pieces,
                        std::string& temp) {
  const std::string folder = folder_of(name.key);
  temp = folder + "/" + std::string(kTempPrefix) + temp_tag_ + std::to_string(++temp_counter_);
  Status status = check_way(name);
  if (status.is_ok()) status = env_.write_new(temp, pieces);
  if (status.code() == StatusCode::NotFound) {
    // First block in this folder, or somebody removed the tree.
    status = env_.make_directories(folder);
    if (status.is_ok()) status = env_.check_private(own_);
    if (status.is_ok()) status = env_.write_new(temp, pieces);
  }
  return status;
}

Status Directory::probe() {
  const std::string temp = own_ + "/" + std::string(kTempPrefix) + temp_tag_ + std::to_string(++temp_counter_);
  const std::uint8_t byte = 0;
  const std::span<const std::uint8_t> pieces[] = {{&byte, 1}};
  Status status = env_.write_new(temp, pieces);
  if (status.is_ok()) status = env_.remove(temp);
  return status;
}

void Directory::discard(const std::string& temp, std::uint64_t bytes) {
  env_.remove(temp);
  release(bytes);
}

Status Directory::date(const layout::NameInfo& name, double time) {
  if (Status status = check_way(name); !status.is_ok()) return status;
  return env_.set_modified(path_of(name), time);
}

Status Directory::publish(const std::string& temp, const layout::NameInfo& name, std::uint64_t bytes) {
  Status status = usage_.rename(temp, path_of(name), bytes);
  if (status.is_ok()) return status;
  discard(temp, bytes);
  // Network drives may have done it all the same.
  count_wanted_ = true;
  return status;
}

Status Directory::remove(const layout::NameInfo& name, std::uint64_t bytes) {
  // What lies behind a link is not ours.
  const Status way = check_way(name);
  if (!way.is_ok() && way.code() != StatusCode::NotFound) return way;
  bool told = true;
  is_alive();
  Status status = usage_.remove(path_of(name), bytes, told);
  if (!told) count_wanted_ = true;
  return status.code() == StatusCode::NotFound ? Status::ok() : status;
}

bool Directory::next_foreign(double older_than, FoundPart& out) {
  std::lock_guard lock(foreign_mutex_);
  while (!foreign_.empty() && foreign_.front().modified < older_than) {
    out = std::move(foreign_.front());
    foreign_.pop_front();
    FileInfo info;
    is_alive();
    // A folder may have become a link since the scan: what lies behind it is not ours.
    if (!check_way_to(out.path.substr(0, out.path.rfind('/'))).is_ok()) continue;
    // Who removed it has told so.
    if (!env_.stat(out.path, info).is_ok()) continue;
    if (info.modified <= out.dated) {
      out.bytes = info.size;
      return true;
    }
    // It was used since the scan.
    out.modified = out.dated = info.modified;
    const auto later = std::upper_bound(foreign_.begin(), foreign_.end(), info.modified,
                                        [](double time, const FoundPart& part) { return time < part.modified; });
    foreign_.insert(later, std::move(out));
  }
  return false;
}

bool Directory::evict_foreign(double older_than) {
  FoundPart victim;
  while (next_foreign(older_than, victim)) {
    bool told = true;
    if (usage_.remove(victim.path, victim.bytes, told).is_ok()) return true;
  }
  return false;
}

}  // namespace prefixcache::store
