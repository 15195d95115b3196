// sha256_openssl.cpp: SHA-256 by OpenSSL, everywhere but on macOS.
#ifndef __APPLE__

// The low-level calls have a plain context that can be copied; EVP costs an allocation a digest.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>

#include <new>
#include <type_traits>

#include "hash/sha256.h"

namespace prefixcache::hash {

namespace {

SHA256_CTX* context(std::byte* state) {
  return std::launder(reinterpret_cast<SHA256_CTX*>(state));
}

}  // namespace

Sha256::Sha256() {
  static_assert(sizeof(SHA256_CTX) <= kStateBytes && std::is_trivially_copyable_v<SHA256_CTX>);
  SHA256_Init(new (state_) SHA256_CTX);
}

void Sha256::update(std::span<const std::uint8_t> data) {
  SHA256_Update(context(state_), data.data(), data.size());
}

Key Sha256::finish() {
  Key key;
  SHA256_Final(key.bytes.data(), context(state_));
  return key;
}

}  // namespace prefixcache::hash

#endif
