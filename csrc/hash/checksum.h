// checksum.h: XXH3, from the xxHash library, over bytes in memory. Not cryptographic: it finds damage, not forgery.
//
// Threads: any.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>

namespace prefixcache::hash {

std::uint64_t xxh3_64(std::span<const std::uint8_t> data);

// The 128-bit variant, in the byte order that xxHash calls canonical: the same on every machine.
std::array<std::uint8_t, 16> xxh3_128(std::span<const std::uint8_t> data);

// XXH3-64 over bytes that come in pieces. One object, one thread at a time.
class Xxh3Stream {
 public:
  Xxh3Stream();
  ~Xxh3Stream();
  Xxh3Stream(const Xxh3Stream&) = delete;
  Xxh3Stream& operator=(const Xxh3Stream&) = delete;
  void update(std::span<const std::uint8_t> data);
  std::uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace prefixcache::hash
