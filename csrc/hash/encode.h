// encode.h: little-endian numbers into a hash, on machines of either byte order.
//
// Threads: any.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "hash/sha256.h"

namespace prefixcache::hash {

template <typename T>
std::uint8_t* put_le(std::uint8_t* out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    out[i] = static_cast<std::uint8_t>(static_cast<std::uint64_t>(value) >> (8 * i));
  }
  return out + sizeof(T);
}

template <typename T>
void add_le(Sha256& sha, T value) {
  std::uint8_t bytes[sizeof(T)];
  put_le(bytes, value);
  sha.update(bytes);
}

inline std::span<const std::uint8_t> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

inline void add_tokens(Sha256& sha, std::span<const std::uint32_t> tokens) {
  if constexpr (std::endian::native == std::endian::little) {
    sha.update({reinterpret_cast<const std::uint8_t*>(tokens.data()), tokens.size_bytes()});
  } else {
    for (const std::uint32_t token : tokens) add_le(sha, token);
  }
}

}  // namespace prefixcache::hash
