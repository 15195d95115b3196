// checksum.cpp: XXH3 with what every machine has (SSE2, NEON), and the choice of a faster backend at run time.
#include "hash/checksum.h"

#include "hash/xxh3_backend.h"
#include "hash/xxh3_backend_impl.h"

namespace prefixcache::hash {

namespace {

const Xxh3Backend& choose() {
#ifdef __x86_64__
  const Xxh3Backend* avx2 = xxh3_avx2_backend();
  if (avx2 != nullptr && __builtin_cpu_supports("avx2")) return *avx2;
#endif
  return kBackend;
}

const Xxh3Backend& backend() {
  static const Xxh3Backend& chosen = choose();
  return chosen;
}

}  // namespace

std::uint64_t xxh3_64(std::span<const std::uint8_t> data) {
  return backend().hash64(data.data(), data.size());
}

std::array<std::uint8_t, 16> xxh3_128(std::span<const std::uint8_t> data) {
  std::array<std::uint8_t, 16> digest;
  backend().hash128(data.data(), data.size(), digest.data());
  return digest;
}

struct Xxh3Stream::State {
  XXH3_state_t xxh;
};

Xxh3Stream::Xxh3Stream() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh);
}

Xxh3Stream::~Xxh3Stream() = default;

void Xxh3Stream::update(std::span<const std::uint8_t> data) {
  backend().update(&state_->xxh, data.data(), data.size());
}

std::uint64_t Xxh3Stream::digest() const {
  return backend().digest(&state_->xxh);
}

}  // namespace prefixcache::hash
