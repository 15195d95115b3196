// store_points.cpp: how far the rows of a window and the recurrent states reach.
#include <algorithm>
#include <stdexcept>

#include "store/common_rows.h"
#include "store/store_impl.h"

namespace prefixcache::store {

namespace {

// Questions to the disk for parts that another process may have written.
constexpr int kMostProbes = 8;
// Headers of one parent's blocks that one call reads; the next call reads on.
constexpr std::size_t kMostHeaders = 64;

constexpr Part kWin[] = {Part::win};
constexpr Part kState[] = {Part::state};
constexpr Part kRowsOrState[] = {Part::kv, Part::state};

std::int64_t checked_limit(const ChainView& chain, std::int64_t limit) {
  if (chain.block_size < 1) {
    throw std::invalid_argument("[BlockStore] block_size is " + std::to_string(chain.block_size) +
                                ", expected 1 or more");
  }
  return std::min(limit, static_cast<std::int64_t>(chain.tokens.size()));
}

// The block in which token `limit` - 1 lies, if its parent is known; -1 for no token.
std::int64_t last_block(const ChainView& chain, std::int64_t limit) {
  if (limit <= 0) return -1;
  return std::min((limit - 1) / chain.block_size, static_cast<std::int64_t>(chain.keys.size()));
}

const Key& parent_of_block(const ChainView& chain, std::int64_t i) {
  return i == 0 ? chain.root : chain.keys[static_cast<std::size_t>(i - 1)];
}

// Tokens of block `i`, and of what follows it.
std::span<const std::uint32_t> tokens_from(const ChainView& chain, std::int64_t i) {
  return chain.tokens.subspan(static_cast<std::size_t>(i * chain.block_size));
}

}  // namespace

bool StoreImpl::rows_of(const Key& key, Part part, std::int64_t& row_lo, std::int64_t& row_hi) {
  for (bool looked = false;; looked = true) {
    {
      Lock lock(mutex_);
      const PartRecord* record = index_.find(key, part);
      if (record == nullptr) return false;
      row_lo = record->row_lo;
      row_hi = record->row_hi;
    }
    if (row_lo >= 0) return true;
    if (looked) return false;
    Source source;
    if (Status status = open_file(key, part, source); !status.is_ok()) forget(key, part, source.version, status);
  }
}

namespace {

// Null if it has none of the parts.
const PartRecord* part_in(const Entry& entry, std::span<const Part> any_of) {
  for (const Part part : any_of) {
    if (entry.parts[static_cast<int>(part)] != nullptr) return entry.parts[static_cast<int>(part)].get();
  }
  return nullptr;
}

}  // namespace

void StoreImpl::read_children(const Key& parent, std::span<const Part> any_of, const Key* first) {
  std::vector<std::pair<Key, Part>> unknown;
  {
    Lock lock(mutex_);
    const auto add = [&](const Entry& entry) {
      const PartRecord* record = part_in(entry, any_of);
      if (record != nullptr && (entry.text == nullptr || !entry.parent_known)) {
        unknown.emplace_back(entry.key, record->part);
      }
    };
    if (const Entry* entry = first == nullptr ? nullptr : index_.find(*first)) add(*entry);
    const auto& entries = index_.unread_children(layout::parent_prefix(parent));
    for (auto entry = entries.rbegin(); entry != entries.rend() && unknown.size() < kMostHeaders; ++entry) {
      add(**entry);
    }
  }
  for (const auto& [key, part] : unknown) text_of(key, parent, part);
}

void StoreImpl::visit_children(const Key& parent, std::span<const Part> any_of, const Key* first,
                               std::span<const std::uint32_t> tokens,
                               const std::function<void(const Entry&, const BlockText&)>& visit) {
  read_children(parent, any_of, first);
  if (tokens.empty()) return;
  Lock lock(mutex_);
  for (const Entry* entry : index_.children(layout::parent_prefix(parent), tokens[0])) {
    if (!entry->parent_known || entry->parent != parent) continue;
    if (part_in(*entry, any_of) != nullptr) visit(*entry, *entry->text);
  }
}

Point StoreImpl::window_in_block(const ChainView& chain, const WindowReach& reach, std::int64_t n) {
  const std::int64_t i = (n - 1) / chain.block_size;
  const std::int64_t start = i * chain.block_size;
  const Key parent = group_key(parent_of_block(chain, i), reach.group);
  const bool whole = static_cast<std::size_t>(i) < chain.keys.size();
  const Key own = whole ? group_key(chain.keys[static_cast<std::size_t>(i)], reach.group) : Key{};
  Point best;
  const auto consider = [&](const Key& key, const BlockText& text, std::int64_t lo, std::int64_t hi) {
    const std::int64_t common = common_rows(text, start, tokens_from(chain, i), chain.content);
    const std::int64_t reached = std::min({n, start + common, hi});
    // Of equals the newest, which is visited last: the one that longest_child takes for the other rows.
    if (reached > start && reached >= best.n && lo <= std::max(start, reach.first_row(reached))) {
      best = {reached, group_key(key, reach.group)};
    }
  };
  // The block itself, where all of its tokens are known, then whatever else shares its beginning.
  std::int64_t lo = 0;
  std::int64_t hi = 0;
  if (const auto text = whole ? text_of(own, parent, Part::win) : nullptr; text && rows_of(own, Part::win, lo, hi)) {
    consider(own, *text, lo, hi);
    if (best.n == n) return best;
  }
  visit_children(parent, kWin, nullptr, tokens_from(chain, i), [&](const Entry& entry, const BlockText& text) {
    const PartRecord& record = *entry.parts[static_cast<int>(Part::win)];
    // Where the text is known without a header read since the scan, the rows may not be.
    if (record.row_lo >= 0) consider(entry.key, text, record.row_lo, record.row_hi);
  });
  return best;
}

Point StoreImpl::deepest_window(const ChainView& chain, const WindowReach& reach, std::int64_t limit) {
  std::int64_t n = checked_limit(chain, limit);
  if (reach.window < 1 || reach.keep < 0 || reach.keep >= reach.window) {
    throw std::invalid_argument("[BlockStore::deepest_window] a window of " + std::to_string(reach.window) +
                                " rows that keeps " + std::to_string(reach.keep));
  }
  {
    Lock lock(mutex_);
    asked_for_.window = std::max(asked_for_.window, reach.window);
    asked_for_.keep = std::max(asked_for_.keep, reach.keep);
  }
  const std::int64_t size = chain.block_size;
  look_for_others();
  int probes = 0;
  const auto probe = [&](std::int64_t i) {
    if (static_cast<std::size_t>(i) >= chain.keys.size() || probes++ >= kMostProbes) return false;
    return find_on_disk(group_key(chain.keys[static_cast<std::size_t>(i)], reach.group),
                        group_key(parent_of_block(chain, i), reach.group), (i + 1) * size, Part::win);
  };
  while (n > 0) {
    std::int64_t i = (n - 1) / size;
    Point point = window_in_block(chain, reach, n);
    if (point.n == 0 && probe(i)) point = window_in_block(chain, reach, n);
    const std::int64_t needed = reach.first_row(point.n);
    bool whole = point.n > 0;
    while (whole && i * size > needed) {
      --i;
      const Key key = group_key(chain.keys[static_cast<std::size_t>(i)], reach.group);
      std::int64_t lo = 0;
      std::int64_t hi = 0;
      whole = (rows_of(key, Part::win, lo, hi) || (probe(i) && rows_of(key, Part::win, lo, hi))) &&
              hi == (i + 1) * size && lo <= std::max(i * size, needed);
    }
    if (whole) return point;
    // An earlier n needs earlier rows: only what ends in the block of the gap, or before it, can serve.
    n = std::min((i + 1) * size, (n - 1) / size * size);
  }
  return {};
}

Point StoreImpl::deepest_state(const ChainView& chain, std::int64_t limit) {
  limit = checked_limit(chain, limit);
  {
    Lock lock(mutex_);
    asked_for_.states = true;
  }
  if (limit <= 0) return {};
  look_for_others();
  const std::int64_t last = last_block(chain, limit);
  if (static_cast<std::size_t>(last) < chain.keys.size() && (last + 1) * chain.block_size <= limit) {
    find_on_disk(chain.keys[static_cast<std::size_t>(last)], parent_of_block(chain, last),
                 (last + 1) * chain.block_size, Part::state);
  }
  for (std::int64_t i = last; i >= 0; --i) {
    const std::int64_t start = i * chain.block_size;
    const Key* own =
        static_cast<std::size_t>(i) < chain.keys.size() ? &chain.keys[static_cast<std::size_t>(i)] : nullptr;
    Point best;
    visit_children(parent_of_block(chain, i), kState, own, tokens_from(chain, i),
                   [&](const Entry& entry, const BlockText& text) {
                     const auto count = static_cast<std::int64_t>(text.tokens.size());
                     if (start + count > limit || start + count <= best.n) return;
                     if (common_rows(text, start, tokens_from(chain, i), chain.content) == count)
                       best = {start + count, entry.key};
                   });
    if (best.n > 0) return best;
  }
  return {};
}

bool StoreImpl::other_child(const Key& parent, std::uint32_t first_token) const {
  Lock lock(mutex_);
  const auto& entries = index_.children(layout::parent_prefix(parent));
  return std::any_of(entries.begin(), entries.end(), [&](const Entry* entry) {
    if (entry->text == nullptr || !entry->parent_known || entry->parent != parent) return false;
    const auto& tokens = entry->text->tokens;
    return !tokens.empty() && tokens[0] != first_token && part_in(*entry, kRowsOrState) != nullptr;
  });
}

std::int64_t StoreImpl::deepest_fork(const ChainView& chain, std::int64_t limit) {
  limit = checked_limit(chain, limit);
  for (std::int64_t i = last_block(chain, limit); i >= 0; --i) {
    const Key& parent = parent_of_block(chain, i);
    const std::int64_t start = i * chain.block_size;
    std::int64_t fork = 0;
    const Key* own =
        static_cast<std::size_t>(i) < chain.keys.size() ? &chain.keys[static_cast<std::size_t>(i)] : nullptr;
    const auto tokens = tokens_from(chain, i);
    visit_children(parent, kRowsOrState, nullptr, tokens, [&](const Entry& entry, const BlockText& text) {
      if (own != nullptr && entry.key == *own) return;
      const std::int64_t common = common_rows(text, start, tokens, chain.content);
      if (common < static_cast<std::int64_t>(text.tokens.size()) && start + common < limit) {
        fork = std::max(fork, start + common);
      }
    });
    // Those that begin with another token leave it at the start.
    if (fork == 0 && start > 0 && other_child(parent, tokens[0])) return start;
    if (fork > 0) return fork;
  }
  return 0;
}

void StoreImpl::touch(const Key& key, Part part) {
  Lock lock(mutex_);
  if (PartRecord* record = index_.find(key, part)) use(*record);
}

}  // namespace prefixcache::store
