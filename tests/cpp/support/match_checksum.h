// match_checksum.h: makes damage to a header look intended.
#pragma once

#include <cstdint>
#include <string>

#include "hash/checksum.h"

namespace prefixcache::testing {

// Puts the checksum of what the header of `file` now says into it, if there is a header. The checksum's place is fixed:
// behind the length and the first two keys.
inline void match_checksum(std::string& file) {
  constexpr std::size_t kAt = 8 + sizeof(R"({"__metadata__":{"format":"prefixcache.v1","checksum":")") - 1;
  if (file.size() < kAt + 16) return;
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<std::uint8_t>(file[static_cast<std::size_t>(i)]);
  if (length > file.size() - 8 || length + 8 < kAt + 16) return;
  file.replace(kAt, 16, 16, '0');
  const std::uint64_t digest = hash::xxh3_64({reinterpret_cast<const std::uint8_t*>(file.data()), length + 8});
  for (std::size_t i = 0; i < 16; ++i) file[kAt + i] = "0123456789abcdef"[digest >> (60 - 4 * i) & 15];
}

}  // namespace prefixcache::testing
