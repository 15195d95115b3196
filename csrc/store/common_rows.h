// common_rows.h: how much of a block stands for the caller's sequence.
//
// Threads: a plain function; any thread.
#pragma once

#include <cstdint>
#include <span>

#include "prefixcache/block_hash.h"
#include "store/index.h"

namespace prefixcache::store {

// Rows of the child's block that stand for the same tokens and the same content as the caller's sequence. `tokens`
// begin at position `start`, as the block does; `content` is that of the whole sequence.
std::int64_t common_rows(const BlockText& child, std::int64_t start, std::span<const std::uint32_t> tokens,
                         std::span<const ContentKey> content);

}  // namespace prefixcache::store
