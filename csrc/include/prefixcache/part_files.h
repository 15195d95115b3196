// part_files.h: the files of a store one by one, for tools that look after a directory. No store need be open.
//
// Threads: plain functions and values; any thread. Other processes may write and remove files meanwhile.
// Owns:    nothing.
// Units:   bytes for sizes, tokens for rows and depths, seconds since the epoch for times.
// Errors:  a file that is gone is NotFound, one that is not sound is Corrupt with the reason; nothing is removed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixcache/api.h"
#include "prefixcache/block_hash.h"
#include "prefixcache/env.h"
#include "prefixcache/slot.h"
#include "prefixcache/status.h"

namespace prefixcache {

// What the name of a part file says (docs/block_format.md).
struct PartName {
  Key key;
  std::uint64_t parent_prefix = 0;  // the first 8 bytes of the parent's key, most significant first
  std::int64_t depth = 0;
  Part part = Part::kv;
};

// False, and `out` untouched, for every name that a store does not give.
PREFIXCACHE_API bool parse_part_name(std::string_view file_name, PartName& out);

// What the header of a part file says.
struct PartSummary {
  std::int64_t row_lo = 0;
  std::int64_t row_hi = 0;
  std::uint64_t tokens = 0;
  std::uint64_t tensors = 0;
  std::uint64_t tensor_bytes = 0;
};

// Checks the part file at `path`: its header, that it is the part its name says and, with `data`, every tensor's
// digest. Sets `out` once the header is sound. Returns: Ok, NotFound, Corrupt, IOError.
PREFIXCACHE_API Status check_part(Env& env, const std::string& path, bool data, PartSummary& out);

struct PartAge {
  PartName name;
  double modified = 0;
};

// The order in which a store would evict these, first to go first, as places in `parts`. A block of a chain counts as
// used when the latest of its descendants was, which `modified` then says, and the deepest goes first: wherever a tool
// stops, what stays are prefixes.
PREFIXCACHE_API std::vector<std::size_t> eviction_order(std::span<PartAge> parts);

}  // namespace prefixcache
