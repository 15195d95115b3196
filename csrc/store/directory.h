// directory.h: the names below a store's directory, and how many bytes lie there.
//
// Threads: any; scans wait for each other.
// Owns:    the files of one namespace, and leftovers of its own writes.
// Units:   bytes; seconds since the epoch.
// Errors:  prepare() answers IOError with EPERM where others could write.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "layout/block_file.h"
#include "prefixcache/env.h"
#include "store/usage.h"

namespace prefixcache::store {

// A file that a scan found.
struct FoundPart {
  layout::NameInfo name;
  std::uint64_t bytes = 0;
  double modified = 0;  // after sort_by_recency: when it or what follows it was used last
  double dated = 0;     // the file's own time
  std::string path;
};

// Oldest first, each block as recent as the most recent of its descendants: evicting from the front leaves prefixes.
void sort_by_recency(std::vector<FoundPart>& parts);

class Directory {
 public:
  Directory(Env& env, std::string root, const std::string& name_space, double temp_grace_seconds);

  // Makes the directories and checks who may write to them.
  Status prepare();

  // Lists every part of this namespace, counts the bytes of all and removes old temporary files. Reads no file.
  // What was evicted or stored before is not in the answer for sure: others may write and remove meanwhile.
  Status scan(std::vector<FoundPart>& parts);

  // Others have reserved room since the last look() or scan().
  bool others_wrote() { return usage_.others_reserved(); }
  // Lists the folders of this namespace that changed since they were listed last.
  Status look(std::vector<FoundPart>& parts);

  std::string path_of(const layout::NameInfo& name) const;
  // Whether the folders on the way to a part are folders: what lies behind a link is not ours to read or to remove.
  // NotFound where one is missing.
  Status check_way(const layout::NameInfo& name);
  // Room for a file, below `limit` for all that lies below the root. NotFound: scan() first.
  Status reserve(std::uint64_t bytes, std::uint64_t limit, bool& granted);
  void release(std::uint64_t bytes) { usage_.release(bytes); }
  // Writes a part under a temporary name: `temp`. Its room was reserved.
  Status write(const layout::NameInfo& name, std::span<const std::span<const std::uint8_t>> pieces, std::string& temp);
  // Removes it and gives its room back.
  void discard(const std::string& temp, std::uint64_t bytes);
  // Gives it its own name, and the room back of the file that had it. On failure nothing of it stays, its room neither.
  Status publish(const std::string& temp, const layout::NameInfo& name, std::uint64_t bytes);
  Status remove(const layout::NameInfo& name, std::uint64_t bytes);
  // Whether something can be written.
  Status probe();
  // When a file was used, for the order of evictions after a restart and in other processes.
  Status date(const layout::NameInfo& name, double time);

  // Bytes below the root, of all processes, as last seen.
  std::uint64_t used() const { return usage_.used(); }
  // Removes the oldest file of another namespace, if it was used before `older_than`; false if there is none.
  bool evict_foreign(double older_than);
  // A number that changes while long work goes on.
  std::uint64_t signs_of_life() const { return signs_.load(); }
  void is_alive() { ++signs_; }
  // A file was missing, and nobody can tell whether its bytes are still counted. Cleared by scan().
  bool count_wanted() const { return count_wanted_.load(); }

 private:
  Status check_folder(const std::string& path);
  // As check_way, for a path below v1 of any namespace.
  Status check_way_to(const std::string& path);
  std::string folder_of(const Key& key) const;
  Status scan_namespace(const std::string& path, bool own, std::vector<FoundPart>& parts);
  // A temporary file, and nobody is writing it any more.
  bool remove_leftover(const std::string& folder, const DirEntry& file);
  void scan_file(const std::string& folder, const DirEntry& file, bool own, std::vector<FoundPart>& parts);
  bool changed(const DirEntry& folder);
  bool next_foreign(double older_than, FoundPart& out);

  Env& env_;
  const std::string root_;
  const std::string versioned_;
  const std::string own_;
  const double temp_grace_seconds_;
  Usage usage_;
  std::atomic<bool> count_wanted_{false};
  std::atomic<std::uint64_t> signs_{0};
  const std::string temp_tag_;  // random: process numbers repeat, in containers and over restarts
  std::atomic<std::uint64_t> temp_counter_{0};
  std::uint64_t scanned_bytes_ = 0;      // of the scan under way
  std::vector<FoundPart> scan_foreign_;  // of the scan under way
  std::mutex scan_mutex_;
  std::unordered_map<std::string, double> listed_;  // folders of this namespace; of the scan or look under way
  std::mutex foreign_mutex_;
  std::deque<FoundPart> foreign_;  // oldest first
};

}  // namespace prefixcache::store
