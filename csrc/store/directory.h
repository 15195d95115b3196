// directory.h: the names below a store's directory, and how many bytes lie there.
//
// Threads: any; usage is guarded inside.
// Owns:    the files of one namespace, and leftovers of its own writes.
// Units:   bytes; seconds since the epoch.
// Errors:  prepare() answers IOError with EPERM where others could write.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "layout/block_file.h"
#include "prefixcache/env.h"

namespace prefixcache::store {

// A file that a scan found, of this namespace.
struct FoundPart {
  layout::NameInfo name;
  std::uint64_t bytes = 0;
  double modified = 0;
  std::string path;
};

// Oldest first, each block as recent as the most recent of its descendants: evicting from the front leaves prefixes.
void sort_by_recency(std::vector<FoundPart>& parts);

class Directory {
 public:
  Directory(Env& env, std::string root, const std::string& name_space, double temp_grace_seconds);

  // Makes the directories and checks who may write to them.
  Status prepare();

  // Lists every part of this namespace, sums what others use and removes old temporary files. Reads no file.
  std::vector<FoundPart> scan();

  std::string path_of(const layout::NameInfo& name) const;
  // Writes a part under a temporary name: `temp`.
  Status write(const layout::NameInfo& name, std::span<const std::span<const std::uint8_t>> pieces, std::string& temp);
  // Gives it its own name. On failure nothing of it stays.
  Status publish(const std::string& temp, const layout::NameInfo& name, std::uint64_t bytes);
  Status remove(const layout::NameInfo& name, std::uint64_t bytes);

  // Bytes below the root: this namespace and all others, as far as this process knows.
  std::uint64_t used() const { return used_.load(); }
  void add_found(std::uint64_t bytes) { used_ += bytes; }
  void count_less(std::uint64_t bytes);
  // Removes the oldest file of another namespace; false if there is none left.
  bool evict_foreign();

 private:
  Status check_folder(const std::string& path);
  std::string folder_of(const Key& key) const;
  void scan_namespace(const std::string& path, bool own, std::vector<FoundPart>& parts);
  void scan_file(const std::string& folder, const DirEntry& file, bool own, std::vector<FoundPart>& parts);

  Env& env_;
  const std::string root_;
  const std::string own_;
  const double temp_grace_seconds_;
  std::atomic<std::uint64_t> used_{0};
  const std::string temp_tag_;  // random: process numbers repeat, in containers and over restarts
  std::atomic<std::uint64_t> temp_counter_{0};
  std::mutex foreign_mutex_;
  std::deque<FoundPart> foreign_;  // oldest first
};

}  // namespace prefixcache::store
