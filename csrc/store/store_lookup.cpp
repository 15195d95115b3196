// store_lookup.cpp: what is there, from the index.
#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "store/common_rows.h"
#include "store/store_impl.h"

namespace prefixcache::store {

std::vector<Presence> StoreImpl::presence(std::span<const Key> keys) const {
  std::vector<Presence> result(keys.size());
  Lock lock(mutex_);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const Entry* entry = index_.find(keys[i]);
    for (int p = 0; entry != nullptr && p < kPartCount; ++p) {
      const PartRecord* record = entry->parts[p].get();
      if (record == nullptr) continue;
      result[i].parts[p] = {true, record->image != nullptr, record->on_disk, record->row_lo, record->row_hi};
    }
  }
  return result;
}

std::size_t StoreImpl::longest_prefix(std::span<const Key> keys, const Key& root, std::int64_t block_size, Part part) {
  if (block_size < 1) {
    throw std::invalid_argument("[BlockStore::longest_prefix] block_size is " + std::to_string(block_size) +
                                ", expected 1 or more");
  }
  std::size_t found = 0;
  for (;;) {
    {
      Lock lock(mutex_);
      for (; found < keys.size(); ++found) {
        const PartRecord* record = index_.find(keys[found], part);
        if (record == nullptr) break;
        // Unknown rows are those of a file whose name says that the whole block is in it.
        const auto depth = static_cast<std::int64_t>(found + 1) * block_size;
        if (record->row_lo >= 0 && (record->row_lo > depth - block_size || record->row_hi < depth)) return found;
      }
    }
    if (found == keys.size()) return found;
    const auto depth = static_cast<std::int64_t>(found + 1) * block_size;
    if (!find_on_disk(keys[found], found == 0 ? root : keys[found - 1], depth, part)) return found;
  }
}

Status StoreImpl::no_answer() {
  return {StatusCode::IOError, "the disk does not answer in time", ETIMEDOUT};
}

bool StoreImpl::find_on_disk(const Key& key, const Key& parent, std::int64_t depth, Part part) {
  if (directory_ == nullptr || closed_) return false;
  return ask_disk<bool>([this, key, parent, depth, part] { return find_on_disk_now(key, parent, depth, part); }, false);
}

bool StoreImpl::find_on_disk_now(const Key& key, const Key& parent, std::int64_t depth, Part part) {
  FileInfo info;
  const layout::NameInfo name{key, layout::parent_prefix(parent), depth, part};
  std::lock_guard names_lock(names_mutex_);
  if (!directory_->check_way(name).is_ok()) return false;
  if (!env_.stat(directory_->path_of(name), info).is_ok() || !info.is_regular) return false;
  Lock lock(mutex_);
  Entry& entry = index_.entry(key, name.parent_prefix, depth);
  index_.set_parent(entry, parent);
  PartRecord& record = index_.part(entry, part);
  if (record.image || record.on_disk) return true;
  record.on_disk = true;
  record.file_bytes = info.size;
  record.used_at = record.dated_at = info.modified;
  record.seen_in_scan = scan_number_;
  index_.add_to_disk(record);
  return true;
}

std::shared_ptr<const BlockText> StoreImpl::text_of(const Key& key, const Key& parent, Part part) {
  {
    Lock lock(mutex_);
    const Entry* entry = index_.find(key);
    if (entry == nullptr || (entry->parent_known && entry->parent != parent)) return nullptr;
    if (entry->text != nullptr && entry->parent_known) return entry->text;
  }
  Source source;
  if (Status status = open_file(key, part, source); !status.is_ok()) {
    forget(key, part, source.version, status);
    return nullptr;
  }
  const auto& header = source.header();
  if (header.parent != parent) return nullptr;
  return std::make_shared<BlockText>(BlockText{header.tokens, header.content});
}

std::vector<Child> StoreImpl::children(const Key& parent) {
  struct Candidate {
    Key key;
    std::int64_t depth;
    Part part;
  };
  look_for_others();
  std::vector<Candidate> candidates;
  {
    Lock lock(mutex_);
    const std::deque<Entry*> entries = index_.children(layout::parent_prefix(parent));
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
      const auto& parts = (*entry)->parts;
      const auto any = std::find_if(parts.begin(), parts.end(), [](const auto& p) { return p != nullptr; });
      candidates.push_back({(*entry)->key, (*entry)->depth, (*any)->part});
    }
  }
  std::vector<Child> result;
  for (const auto& candidate : candidates) {
    const auto text = text_of(candidate.key, parent, candidate.part);
    if (text != nullptr) result.push_back({candidate.key, candidate.depth, text->tokens, text->content});
  }
  return result;
}

ChildMatch StoreImpl::longest_child(const Key& parent, std::int64_t start, std::span<const std::uint32_t> tokens,
                                    std::span<const ContentKey> content, Part part) {
  ChildMatch best;
  const Part wanted[] = {part};
  look_for_others();
  visit_children(parent, wanted, nullptr, tokens, [&](const Entry& entry, const BlockText& text) {
    const auto count = static_cast<std::int64_t>(text.tokens.size());
    if (entry.depth != start + count) return;
    const std::int64_t rows = common_rows(text, start, tokens, content);
    // Of equals the newest, which is the last one visited.
    if (rows >= best.rows || best.block_rows == 0) best = {entry.key, entry.depth, rows, count};
  });
  if (best.block_rows != 0) return best;
  // The newest, with nothing in common.
  Lock lock(mutex_);
  const auto& entries = index_.children(layout::parent_prefix(parent));
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if ((*entry)->text == nullptr || !(*entry)->parent_known || (*entry)->parent != parent) continue;
    const auto count = static_cast<std::int64_t>((*entry)->text->tokens.size());
    if ((*entry)->parts[static_cast<int>(part)] == nullptr || (*entry)->depth != start + count) continue;
    return {(*entry)->key, (*entry)->depth, 0, count};
  }
  return best;
}

}  // namespace prefixcache::store
