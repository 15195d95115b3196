// sha256_commoncrypto.cpp: SHA-256 by CommonCrypto, on macOS.
#ifdef __APPLE__

#include <CommonCrypto/CommonDigest.h>

#include <algorithm>
#include <new>
#include <type_traits>

#include "hash/sha256.h"

namespace prefixcache::hash {

namespace {

// CommonCrypto counts bytes in 32 bits.
constexpr std::size_t kLargestPiece = std::size_t{1} << 30;

CC_SHA256_CTX* context(std::byte* state) {
  return std::launder(reinterpret_cast<CC_SHA256_CTX*>(state));
}

}  // namespace

Sha256::Sha256() {
  static_assert(sizeof(CC_SHA256_CTX) <= kStateBytes && std::is_trivially_copyable_v<CC_SHA256_CTX>);
  CC_SHA256_Init(new (state_) CC_SHA256_CTX);
}

void Sha256::update(std::span<const std::uint8_t> data) {
  while (!data.empty()) {
    const auto piece = data.first(std::min(data.size(), kLargestPiece));
    CC_SHA256_Update(context(state_), piece.data(), static_cast<CC_LONG>(piece.size()));
    data = data.subspan(piece.size());
  }
}

Key Sha256::finish() {
  Key key;
  CC_SHA256_Final(key.bytes.data(), context(state_));
  return key;
}

}  // namespace prefixcache::hash

#endif
