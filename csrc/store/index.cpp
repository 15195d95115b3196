#include "store/index.h"

#include <algorithm>

#include "layout/block_file.h"

namespace prefixcache::store {

Entry* Index::find(const Key& key) const {
  const Entries& entries = entries_[shard_of(key)];
  const auto found = entries.find(key);
  return found == entries.end() ? nullptr : found->second.get();
}

PartRecord* Index::find(const Key& key, Part part) const {
  Entry* entry = find(key);
  return entry == nullptr ? nullptr : entry->parts[static_cast<int>(part)].get();
}

Entry& Index::entry(const Key& key, std::uint64_t parent_prefix, std::int64_t depth, bool is_old) {
  auto& slot = entries_with(key)[key];
  if (slot == nullptr) {
    slot = std::make_unique<Entry>();
    slot->key = key;
    slot->parent_prefix = parent_prefix;
    slot->depth = depth;
    Family& family = families_with(parent_prefix)[parent_prefix];
    slot->place = is_old ? --oldest_place_ : ++newest_place_;
    for (auto* list : {&family.all, &family.unread}) {
      is_old ? list->push_front(slot.get()) : list->push_back(slot.get());
    }
  }
  return *slot;
}

PartRecord& Index::part(Entry& entry, Part part) {
  auto& slot = entry.parts[static_cast<int>(part)];
  if (slot == nullptr) {
    slot = std::make_unique<PartRecord>();
    slot->entry = &entry;
    slot->part = part;
    renew(*slot);
    ++part_count_;
  }
  return *slot;
}

void Index::set_parent(Entry& entry, const Key& parent) {
  entry.parent = parent;
  entry.parent_known = true;
}

void Index::set_text(Entry& entry, BlockText text) {
  if (entry.text != nullptr) return;
  entry.text = std::make_shared<BlockText>(std::move(text));
  const auto& tokens = entry.text->tokens;
  if (tokens.empty()) return;
  auto& same = families_with(entry.parent_prefix)[entry.parent_prefix].by_first_token[tokens[0]];
  const auto older = [](const Entry* a, const Entry* b) { return a->place < b->place; };
  same.insert(std::upper_bound(same.begin(), same.end(), &entry, older), &entry);
}

PartRecord* Index::parent_of(const PartRecord& record) const {
  const Entry& entry = *record.entry;
  if (record.part != Part::kv) return nullptr;
  PartRecord* parent = entry.parent_known ? find(entry.parent, record.part) : nullptr;
  // Names and headers may claim anything; a parent that does not end before its child would make a circle.
  return parent != nullptr && parent->entry->depth < entry.depth ? parent : nullptr;
}

bool Index::has_child(const PartRecord& record) const {
  return record.part == Part::kv && family(layout::parent_prefix(record.entry->key)) != nullptr;
}

void Index::add_to_ram(PartRecord& record) {
  if (record.in_ram_order) return;
  PartRecord* parent = parent_of(record);
  record.ram_place = ram_.insert(&record, parent != nullptr && parent->in_ram_order ? &parent->ram_place : nullptr);
  record.in_ram_order = true;
  if (has_child(record)) touch(record);
}

void Index::add_to_disk(PartRecord& record) {
  if (record.in_disk_order) return;
  PartRecord* parent = parent_of(record);
  record.disk_place = disk_.insert(&record, parent != nullptr && parent->in_disk_order ? &parent->disk_place : nullptr);
  record.in_disk_order = true;
  if (has_child(record)) touch(record);
}

void Index::add_to_disk_last(PartRecord& record) {
  if (record.in_disk_order) return;
  record.disk_place = disk_.insert_last(&record);
  record.in_disk_order = true;
  // A block of its chain came earlier.
  if (has_child(record)) touch(record);
}

void Index::remove_from_ram(PartRecord& record) {
  if (record.in_ram_order) ram_.remove(record.ram_place);
  record.in_ram_order = false;
}

void Index::remove_from_disk(PartRecord& record) {
  if (record.in_disk_order) disk_.remove(record.disk_place);
  record.in_disk_order = false;
}

void Index::remove(PartRecord& record) {
  remove_from_ram(record);
  remove_from_disk(record);
  Entry& entry = *record.entry;
  entry.parts[static_cast<int>(record.part)].reset();
  --part_count_;
  const bool empty = std::none_of(entry.parts.begin(), entry.parts.end(), [](const auto& p) { return p != nullptr; });
  if (!empty) return;
  Families& families = families_with(entry.parent_prefix);
  const auto family = families.find(entry.parent_prefix);
  std::erase(family->second.all, &entry);
  std::erase(family->second.unread, &entry);
  if (entry.text != nullptr && !entry.text->tokens.empty()) {
    const auto same = family->second.by_first_token.find(entry.text->tokens[0]);
    std::erase(same->second, &entry);
    if (same->second.empty()) family->second.by_first_token.erase(same);
  }
  if (family->second.all.empty()) families.erase(family);
  const Key key = entry.key;
  entries_with(key).erase(key);
}

void Index::touch(PartRecord& record, double now) {
  for (PartRecord* at = &record; at != nullptr; at = parent_of(*at)) {
    if (at->in_ram_order) ram_.to_front(at->ram_place);
    if (at->in_disk_order) disk_.to_front(at->disk_place);
    at->used_at = std::max(at->used_at, now);
  }
}

void Index::use(PartRecord& record, double now, double date_every, std::vector<PartRecord*>& to_date) {
  touch(record, now);
  for (PartRecord* at = &record; at != nullptr; at = parent_of(*at)) {
    if (at->on_disk && now - at->dated_at >= date_every) to_date.push_back(at);
  }
}

namespace {

const std::deque<Entry*> kNone;

}  // namespace

const Index::Family* Index::family(std::uint64_t parent_prefix) const {
  const Families& families = children_[shard_of(parent_prefix)];
  const auto found = families.find(parent_prefix);
  return found == families.end() ? nullptr : &found->second;
}

const std::deque<Entry*>& Index::children(std::uint64_t parent_prefix) const {
  const Family* found = family(parent_prefix);
  return found == nullptr ? kNone : found->all;
}

const std::deque<Entry*>& Index::children(std::uint64_t parent_prefix, std::uint32_t first_token) const {
  const Family* of_parent = family(parent_prefix);
  if (of_parent == nullptr) return kNone;
  const auto found = of_parent->by_first_token.find(first_token);
  return found == of_parent->by_first_token.end() ? kNone : found->second;
}

const std::deque<Entry*>& Index::unread_children(std::uint64_t parent_prefix) {
  Families& families = families_with(parent_prefix);
  const auto found = families.find(parent_prefix);
  if (found == families.end()) return kNone;
  auto& unread = found->second.unread;
  std::erase_if(unread, [](const Entry* entry) { return entry->text != nullptr && entry->parent_known; });
  return unread;
}

std::vector<PartRecord*> Index::all() const {
  std::vector<PartRecord*> records;
  records.reserve(part_count_);
  for (std::size_t shard = 0; shard < kShards; ++shard) {
    for_each(shard, [&](PartRecord& record) { records.push_back(&record); });
  }
  return records;
}

void Index::for_each(std::size_t shard, const std::function<void(PartRecord&)>& visit) const {
  for (const auto& [key, entry] : entries_[shard]) {
    for (const auto& part : entry->parts) {
      if (part != nullptr) visit(*part);
    }
  }
}

}  // namespace prefixcache::store
