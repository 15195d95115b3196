#include "store/directory.h"

#include <algorithm>
#include <cerrno>
#include <random>
#include <unordered_map>

namespace prefixcache::store {

namespace {

constexpr std::string_view kVersionFolder = "/v1";
constexpr std::string_view kTempPrefix = ".tmp-";

std::string random_tag() {
  std::random_device device;
  return std::to_string(device()) + "-" + std::to_string(device()) + "-";
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
      own_(root_ + std::string(kVersionFolder) + "/" + name_space),
      temp_grace_seconds_(temp_grace_seconds),
      temp_tag_(random_tag()) {}

Status Directory::prepare() {
  // Asked before anything is made in it. What cannot be asked (missing, say) shows when it is made.
  FileInfo info;
  if (env_.stat(root_, info).is_ok()) {
    if (Status status = env_.check_private(root_); !status.is_ok()) return status;
  }
  if (Status status = env_.make_directories(own_); !status.is_ok()) return status;
  for (const std::string& path : {root_ + std::string(kVersionFolder), own_}) {
    if (Status status = check_folder(path); !status.is_ok()) return status;
  }
  for (const std::string& path : {root_, root_ + std::string(kVersionFolder), own_}) {
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

std::vector<FoundPart> Directory::scan() {
  std::vector<FoundPart> parts;
  std::vector<DirEntry> spaces;
  if (!env_.list(root_ + std::string(kVersionFolder), spaces).is_ok()) return parts;
  for (const auto& space : spaces) {
    const std::string path = root_ + std::string(kVersionFolder) + "/" + space.name;
    if (space.info.is_directory) scan_namespace(path, path == own_, parts);
  }
  std::lock_guard lock(foreign_mutex_);
  std::vector<FoundPart> foreign(foreign_.begin(), foreign_.end());
  sort_by_recency(foreign);
  foreign_.assign(foreign.begin(), foreign.end());
  sort_by_recency(parts);
  return parts;
}

void Directory::scan_namespace(const std::string& path, bool own, std::vector<FoundPart>& parts) {
  std::vector<DirEntry> folders;
  std::vector<DirEntry> files;
  if (!env_.list(path, folders).is_ok()) return;
  for (const auto& folder : folders) {
    const std::string below = path + "/" + folder.name;
    if (!folder.info.is_directory || !env_.list(below, files).is_ok()) continue;
    for (const auto& file : files) scan_file(below, file, own, parts);
  }
}

void Directory::scan_file(const std::string& folder, const DirEntry& file, bool own, std::vector<FoundPart>& parts) {
  if (!file.info.is_regular) return;
  const std::string path = folder + "/" + file.name;
  if (file.name.starts_with(kTempPrefix) && env_.now() - file.info.modified > temp_grace_seconds_) {
    env_.remove(path);
    return;
  }
  used_ += file.info.size;
  FoundPart part;
  const bool named = layout::parse_file_name(file.name, part.name);
  part.bytes = file.info.size;
  part.modified = file.info.modified;
  part.path = path;
  if (own && named && path == path_of(part.name)) {
    parts.push_back(std::move(part));
  } else if (!file.name.starts_with(kTempPrefix)) {
    std::lock_guard lock(foreign_mutex_);
    foreign_.push_back(std::move(part));
  }
}

Status Directory::write(const layout::NameInfo& name, std::span<const std::span<const std::uint8_t>> pieces,
                        std::string& temp) {
  const std::string folder = folder_of(name.key);
  temp = folder + "/" + std::string(kTempPrefix) + temp_tag_ + std::to_string(++temp_counter_);
  Status status = check_folder(folder);
  if (status.is_ok()) status = env_.write_new(temp, pieces);
  if (status.code() == StatusCode::NotFound) {
    // First block in this folder, or somebody removed the tree.
    status = env_.make_directories(folder);
    if (status.is_ok()) status = env_.check_private(own_);
    if (status.is_ok()) status = env_.write_new(temp, pieces);
  }
  return status;
}

Status Directory::publish(const std::string& temp, const layout::NameInfo& name, std::uint64_t bytes) {
  Status status = env_.rename(temp, path_of(name));
  if (status.is_ok()) {
    used_ += bytes;
  } else {
    env_.remove(temp);
  }
  return status;
}

Status Directory::remove(const layout::NameInfo& name, std::uint64_t bytes) {
  Status status = env_.remove(path_of(name));
  if (status.is_ok() || status.code() == StatusCode::NotFound) {
    count_less(bytes);
    return Status::ok();
  }
  return status;
}

void Directory::count_less(std::uint64_t bytes) {
  std::uint64_t used = used_.load();
  while (!used_.compare_exchange_weak(used, used - std::min(bytes, used))) {
  }
}

bool Directory::evict_foreign() {
  FoundPart victim;
  {
    std::lock_guard lock(foreign_mutex_);
    if (foreign_.empty()) return false;
    victim = std::move(foreign_.front());
    foreign_.pop_front();
  }
  env_.remove(victim.path);
  count_less(victim.bytes);
  return true;
}

}  // namespace prefixcache::store
