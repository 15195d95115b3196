// copy_streaming_other.cpp: where the C library's copy is the best known.
#if !defined(__x86_64__)

#include <cstring>

#include "gather/copy.h"

namespace prefixcache::gather {

void copy_streaming(std::uint8_t* to, const std::uint8_t* from, std::size_t size) {
  std::memcpy(to, from, size);
}

void copy_streaming_and_keep(std::uint8_t* to, std::uint8_t* keep, const std::uint8_t* from, std::size_t size) {
  std::memcpy(keep, from, size);
  std::memcpy(to, keep, size);
}

}  // namespace prefixcache::gather

#endif
