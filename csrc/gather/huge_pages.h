// huge_pages.h: large destinations in huge pages. Faults on 4 KiB pages cost more than the copy that causes them.
#pragma once

#include <cstddef>
#include <cstdint>

#include <sys/mman.h>

namespace prefixcache::gather {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Advises every huge page that the range touches: what shares its first and last one becomes huge too, which is cheaper
// than some hundred faults at each end. Harmless where the system has none.
inline void advise_huge_pages([[maybe_unused]] std::uint8_t* data, [[maybe_unused]] std::size_t size) {
#ifdef MADV_HUGEPAGE
  if (size < kHugePage) return;
  const auto lo = reinterpret_cast<std::uintptr_t>(data) / kHugePage * kHugePage;
  const auto hi = (reinterpret_cast<std::uintptr_t>(data) + size + kHugePage - 1) / kHugePage * kHugePage;
  ::madvise(reinterpret_cast<void*>(lo), hi - lo, MADV_HUGEPAGE);
#endif
}

}  // namespace prefixcache::gather
