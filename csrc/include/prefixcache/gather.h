// gather.h: what BlockStore::gather is asked for and what it answers.
//
// Threads: plain values.
// Owns:    Gathered owns its arrays, each the only owner of its buffer (an append does not copy it).
// Units:   rows are tokens; positions count from the start of the sequence; bytes for sizes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <mlx/array.h>

#include "prefixcache/api.h"
#include "prefixcache/block_hash.h"
#include "prefixcache/slot.h"
#include "prefixcache/status.h"

namespace prefixcache {

struct GatherRequest {
  // Consecutive blocks of one chain. The first must begin at or before row_lo, the last end at or after row_hi.
  std::vector<Key> keys;
  Part part = Part::kv;
  std::int64_t row_lo = 0;
  std::int64_t row_hi = 0;
  // Rows each result has room for, at least row_hi - row_lo. Rows behind the gathered ones are zero.
  std::int64_t capacity = 0;
  // Slots to gather, in this order. Empty: all slots of the part, in the order they were put.
  std::vector<std::string> slots;
  // As in PutRequest.
  std::uint64_t group = 0;
};

struct GatheredSlot {
  std::string name;
  int seq_axis = kNoSeqAxis;
  mlx::core::array array;
};

struct PREFIXCACHE_API Gathered {
  // NotFound or Corrupt: block number `good` of the request could not be served, `slots` is empty and the first `good`
  // blocks may be asked for again.
  Status status;
  std::size_t good = 0;
  std::vector<GatheredSlot> slots;
  // The text given to put() with the last block.
  std::string meta;
  // Stored bytes that were copied, by tier.
  std::uint64_t ram_bytes = 0;
  std::uint64_t disk_bytes = 0;
  // Blocks that were read from each tier.
  std::size_t ram_blocks = 0;
  std::size_t disk_blocks = 0;
};

}  // namespace prefixcache
