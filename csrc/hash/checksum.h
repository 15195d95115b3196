// checksum.h: XXH3-64, from the xxHash library, over bytes in memory. Not cryptographic: it finds damage, not forgery.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace prefixcache::hash {

std::uint64_t xxh3_64(std::span<const std::uint8_t> data);

// The same, over bytes that come in pieces.
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
