// index.h: which parts exist, where, and in which order they may go.
//
// Threads: none of its own: the store's mutex guards every call.
// Owns:    its entries; pointers to them stay valid until the entry is removed.
// Units:   bytes for sizes, tokens for depths.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "prefixcache/block_hash.h"
#include "prefixcache/slot.h"
#include "store/image.h"
#include "store/part_file.h"

namespace prefixcache::store {

struct Entry;
struct PartRecord;

// Parts in the order of their last use, such that no part is newer than the same part of its parent: the last one is
// always the deepest of its chain, and what stays after evictions are prefixes.
class ChainLru {
 public:
  using Place = std::list<PartRecord*>::iterator;

  // Puts `record` behind `parent`'s, or in front of all if the parent is not here.
  Place insert(PartRecord* record, const Place* parent) {
    return order_.insert(parent == nullptr ? order_.begin() : std::next(*parent), record);
  }
  Place insert_last(PartRecord* record) { return order_.insert(order_.end(), record); }
  void to_front(Place place) { order_.splice(order_.begin(), order_, place); }
  void remove(Place place) { order_.erase(place); }
  const std::list<PartRecord*>& order() const { return order_; }

 private:
  std::list<PartRecord*> order_;  // newest first
};

struct PartRecord {
  // What stays is the file; its rows are to be read from its header where it is older than the image was.
  void forget_image() {
    image.reset();
    if (file_is_older) row_lo = row_hi = -1;
    file_is_older = false;
  }

  Entry* entry = nullptr;
  Part part = Part::kv;
  // Another number for every record and for every image that took an older one's place: tells whoever was reading
  // meanwhile that what he read is not this.
  std::uint64_t version = 0;
  // Positions of the rows; unknown (-1) until the header of a file found on disk is read.
  std::int64_t row_lo = -1;
  std::int64_t row_hi = -1;
  std::shared_ptr<Image> image;    // in RAM, or waiting to be written
  std::shared_ptr<PartFile> file;  // open, once it was read
  bool waiting = false;            // queued for the writer: the image must stay
  bool unwritten = false;          // in RAM only, to be written later
  bool leaving = false;            // queued so that it may leave the RAM
  bool on_disk = false;
  bool file_is_older = false;  // it holds fewer rows than the image
  std::uint64_t file_bytes = 0;
  double used_at = 0;   // when it was used last, of a chain the latest of its blocks
  double dated_at = 0;  // the time that its file has
  std::uint64_t seen_in_scan = 0;
  bool in_ram_order = false;
  bool in_disk_order = false;
  ChainLru::Place ram_place;
  ChainLru::Place disk_place;
};

// A block's own tokens and the content keys that first apply in it.
struct BlockText {
  std::vector<std::uint32_t> tokens;
  std::vector<ContentKey> content;
};

struct Entry {
  Key key;
  std::uint64_t parent_prefix = 0;
  Key parent;
  bool parent_known = false;  // files found on disk tell only its first 8 bytes until they are read
  std::int64_t depth = 0;
  std::int64_t place = 0;                 // among all, the oldest first
  std::shared_ptr<const BlockText> text;  // null until known
  std::array<std::unique_ptr<PartRecord>, kPartCount> parts;
};

class Index {
 public:
  Entry* find(const Key& key) const;
  PartRecord* find(const Key& key, Part part) const;

  // The entry of `key`, made if it is new: as the newest child of its parent, or as the oldest.
  Entry& entry(const Key& key, std::uint64_t parent_prefix, std::int64_t depth, bool is_old = false);
  PartRecord& part(Entry& entry, Part part);
  void renew(PartRecord& record) { record.version = ++versions_; }
  void set_parent(Entry& entry, const Key& parent);
  // Once for each entry; a second text is not taken.
  void set_text(Entry& entry, BlockText text);

  // In this tier's order; newer than everything below it in the chain.
  void add_to_ram(PartRecord& record);
  void add_to_disk(PartRecord& record);
  // Behind all others: to be called with the newest first, parents before children.
  void add_to_disk_last(PartRecord& record);
  void remove_from_ram(PartRecord& record);
  void remove_from_disk(PartRecord& record);
  // Drops the record, and its entry with the last one. The caller has taken it from both orders' sums.
  void remove(PartRecord& record);

  // Makes `record` the newest; of a part `kv` the chain that ends at it, its deepest block the oldest of it. The rows
  // of a window and states do not need the same part of the blocks before them: each has its own age.
  void touch(PartRecord& record, double now = 0);
  // As touch, for what was asked for: appends the records whose files have a time older than `date_every` seconds.
  void use(PartRecord& record, double now, double date_every, std::vector<PartRecord*>& to_date);

  // The oldest first. The second: those whose text is known and begins with `first_token`. The third:
  // those whose text or parent is not known yet.
  const std::deque<Entry*>& children(std::uint64_t parent_prefix) const;
  const std::deque<Entry*>& children(std::uint64_t parent_prefix, std::uint32_t first_token) const;
  const std::deque<Entry*>& unread_children(std::uint64_t parent_prefix);
  std::vector<PartRecord*> all() const;
  // All of them in so many steps, so that nobody waits for more than one.
  static constexpr std::size_t kShards = 256;
  void for_each(std::size_t shard, const std::function<void(PartRecord&)>& visit) const;
  std::size_t part_count() const { return part_count_; }
  std::size_t ram_count() const { return ram_.order().size(); }
  const std::list<PartRecord*>& ram_order() const { return ram_.order(); }
  const std::list<PartRecord*>& disk_order() const { return disk_.order(); }

 private:
  PartRecord* parent_of(const PartRecord& record) const;
  bool has_child(const PartRecord& record) const;

  // The blocks of one parent.
  struct Family {
    std::deque<Entry*> all;
    std::deque<Entry*> unread;  // and some that were read since
    std::unordered_map<std::uint32_t, std::deque<Entry*>> by_first_token;
  };

  // In shards: a table that grows is copied while others wait for the mutex.
  using Entries = std::unordered_map<Key, std::unique_ptr<Entry>>;
  using Families = std::unordered_map<std::uint64_t, Family>;
  static std::size_t shard_of(const Key& key) { return key.bytes.back(); }
  static std::size_t shard_of(std::uint64_t parent_prefix) { return parent_prefix >> 56; }
  Entries& entries_with(const Key& key) { return entries_[shard_of(key)]; }
  Families& families_with(std::uint64_t parent_prefix) { return children_[shard_of(parent_prefix)]; }
  const Family* family(std::uint64_t parent_prefix) const;

  std::array<Entries, kShards> entries_;
  std::array<Families, kShards> children_;
  ChainLru ram_;
  ChainLru disk_;
  std::size_t part_count_ = 0;
  std::int64_t newest_place_ = 0;
  std::int64_t oldest_place_ = 0;
  std::uint64_t versions_ = 0;
};

}  // namespace prefixcache::store
