// sha256.h: SHA-256 from the platform's library, over bytes that come in pieces.
//
// Threads: one object, one thread at a time.
// Owns:    a plain state. A copy goes on from where the original stands, so a common beginning is hashed once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "prefixcache/block_hash.h"

namespace prefixcache::hash {

class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::uint8_t> data);
  // The digest of everything so far. Nothing may be added afterwards.
  Key finish();

 private:
  // Room for the library's context, so that no platform header is needed here.
  static constexpr std::size_t kStateBytes = 128;
  alignas(16) std::byte state_[kStateBytes];
};

}  // namespace prefixcache::hash
