// heap_limit.h: what this thread asked the heap for, and may, in programs of which one source has watched_heap.h.
#pragma once

#include <cstddef>
#include <limits>

namespace prefixcache::testing {

// Since the last reset: the sum, and the largest piece.
inline thread_local std::size_t allocated = 0;
inline thread_local std::size_t largest = 0;
// No larger piece is to be had.
inline thread_local std::size_t most = std::numeric_limits<std::size_t>::max();

}  // namespace prefixcache::testing
