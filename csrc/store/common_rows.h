// common_rows.h: how much of a block stands for the caller's sequence.
//
// Threads: plain functions; any thread.
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

// Whether a block begins with all of a shorter one, which ends at `shorter_end`: the same tokens, and the same content
// behind them. Both are of the same parent.
bool begins_with(std::span<const std::uint32_t> tokens, std::span<const ContentKey> content,
                 std::span<const std::uint32_t> shorter, std::span<const ContentKey> shorter_content,
                 std::int64_t shorter_end);

}  // namespace prefixcache::store
