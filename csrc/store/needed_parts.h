// needed_parts.h: what of a chain must stay while a part behind it finds its place.
//
// Threads: none of its own: the store's mutex guards every call.
// Owns:    nothing; index and newcomer outlive it.
// Units:   tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "store/image.h"
#include "store/index.h"

namespace prefixcache::store {

// What was asked for so far: the largest window, the most first rows that one keeps, and whether states were.
struct AskedFor {
  std::int64_t window = 0;
  std::int64_t keep = 0;
  bool states = false;
};

// A sequence can be taken up at its end only with the rows of its last window and with one of its deepest states. A
// newcomer of the same sequence that pushed them out would make all of it useless: it finds another place, or none.
class NeededParts {
 public:
  NeededParts(const Index& index, const Image& newcomer, const AskedFor& asked);

  // Whether `record` is needed to stand where the newcomer begins; if it is not of kv, where it ends. What it looks up
  // is kept: ask while nothing changes.
  bool has(const PartRecord& record);

 private:
  // Whether this is of a tail that the newcomer's block, of the same parent, goes on from.
  bool continued(const PartRecord& record) const;
  bool in_window_blocks(const Key& block);
  void find_window_blocks();
  void find_states();

  const Index& index_;
  const Image& newcomer_;
  const AskedFor asked_;
  Key parent_;  // before group_key()
  std::optional<std::vector<Key>> window_blocks_;
  std::optional<std::vector<const PartRecord*>> states_;
};

}  // namespace prefixcache::store
