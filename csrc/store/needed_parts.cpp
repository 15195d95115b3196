#include "store/needed_parts.h"

#include <algorithm>

#include "layout/block_file.h"
#include "store/common_rows.h"

namespace prefixcache::store {

namespace {

// The deepest one may be of no use yet: rows up to it may still be to come, or have found no room.
constexpr std::size_t kStates = 2;

// Takes the group of `key`, whose block is `block`, off another key of that group.
Key without_group(const Key& of_group, const Key& key, const Key& block) {
  Key result = of_group;
  for (std::size_t i = 0; i < result.bytes.size(); ++i) {
    result.bytes[i] ^= static_cast<std::uint8_t>(key.bytes[i] ^ block.bytes[i]);
  }
  return result;
}

}  // namespace

NeededParts::NeededParts(const Index& index, const Image& newcomer, const AskedFor& asked)
    : index_(index),
      newcomer_(newcomer),
      asked_(asked),
      parent_(without_group(newcomer.header.parent, newcomer.header.key, newcomer.block)) {}

bool NeededParts::has(const PartRecord& record) {
  if (record.part == Part::kv) {
    return newcomer_.header.part == Part::kv && record.entry->parent == parent_ && continued(record);
  }
  if (record.part == Part::state) {
    // A state takes the place of the one before it, if the rows to use it are there.
    if (newcomer_.header.part == Part::state && index_.find(newcomer_.block, Part::kv) != nullptr) return false;
    if (!states_) find_states();
    return std::find(states_->begin(), states_->end(), &record) != states_->end();
  }
  // Only an image says which block its rows belong to; what has none costs no memory.
  if (record.image == nullptr) return false;
  const auto& header = record.image->header;
  if (in_window_blocks(record.image->block)) return true;
  return without_group(header.parent, header.key, record.image->block) == parent_ && continued(record);
}

bool NeededParts::continued(const PartRecord& record) const {
  const auto& header = newcomer_.header;
  const Entry& entry = *record.entry;
  if (entry.text == nullptr || !entry.parent_known || entry.depth >= header.depth) return false;
  // Its place is large enough: the newcomer, which has its rows, can take it over.
  if (record.part == header.part && entry.parent == header.parent && record.image != nullptr &&
      record.image->held() >= BufferPool::rounded(newcomer_.data_bytes)) {
    return false;
  }
  return begins_with(header.tokens, header.content, entry.text->tokens, entry.text->content, entry.depth);
}

bool NeededParts::in_window_blocks(const Key& block) {
  if (!window_blocks_) find_window_blocks();
  return std::find(window_blocks_->begin(), window_blocks_->end(), block) != window_blocks_->end();
}

void NeededParts::find_window_blocks() {
  auto& blocks = window_blocks_.emplace();
  const auto& header = newcomer_.header;
  const std::int64_t start = header.depth - static_cast<std::int64_t>(header.tokens.size());
  // Where the sequence can be taken up: at its end, or where its states stand.
  std::vector<std::int64_t> ends = {header.part == Part::kv ? start : header.depth};
  if (asked_.states) {
    if (!states_) find_states();
    for (const PartRecord* state : *states_) ends.push_back(state->entry->depth);
  }
  if (header.part != Part::kv) blocks.push_back(newcomer_.block);
  Key key = parent_;
  for (const Entry* entry = index_.find(key); entry != nullptr;) {
    const Entry* before = entry->parent_known ? index_.find(entry->parent) : nullptr;
    // Headers may claim anything, circles too.
    if (before != nullptr && before->depth >= entry->depth) before = nullptr;
    const std::int64_t first = before == nullptr ? 0 : before->depth;
    const auto in_window = [&](std::int64_t n) { return first < n && entry->depth > n - asked_.window; };
    if (first < asked_.keep || std::any_of(ends.begin(), ends.end(), in_window)) blocks.push_back(key);
    if (asked_.keep == 0 && entry->depth <= *std::min_element(ends.begin(), ends.end()) - asked_.window) return;
    key = entry->parent;
    entry = before;
  }
}

void NeededParts::find_states() {
  auto& states = states_.emplace();
  BlockText text{newcomer_.header.tokens, newcomer_.header.content};
  std::int64_t depth = newcomer_.header.depth;
  for (Key key = parent_;;) {
    const Entry* deepest = nullptr;
    const std::uint64_t prefix = layout::parent_prefix(key);
    const bool bare = text.tokens.empty();
    for (const Entry* child : bare ? index_.children(prefix) : index_.children(prefix, text.tokens[0])) {
      if (child->parts[static_cast<int>(Part::state)] == nullptr || child->text == nullptr) continue;
      if (child->parent != key || child->depth > depth || (deepest && child->depth <= deepest->depth)) continue;
      const BlockText& own = *child->text;
      if (begins_with(text.tokens, text.content, own.tokens, own.content, child->depth)) deepest = child;
    }
    if (deepest != nullptr) states.push_back(deepest->parts[static_cast<int>(Part::state)].get());
    if (states.size() == kStates) return;
    const Entry* entry = index_.find(key);
    if (entry == nullptr || entry->text == nullptr || !entry->parent_known || entry->depth >= depth) return;
    text = *entry->text;
    depth = entry->depth;
    key = entry->parent;
  }
}

}  // namespace prefixcache::store
