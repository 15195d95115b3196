#include "gather/cpu.h"

#include <algorithm>
#include <cstring>

#include "gather/copy.h"

namespace prefixcache::gather {

namespace {

// Long enough to amortise a call, short enough to be still in the nearest cache when its checksum is taken.
constexpr std::size_t kCheckedRun = std::size_t{8} << 10;

// The run after which the destination lies on a cache line: lines written in two parts cost twice.
std::size_t first_run(const std::uint8_t* to, std::size_t size) {
  const std::size_t to_line = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
  return std::min(size, to_line == 0 ? kCheckedRun : to_line);
}

}  // namespace

void copy_strips(const StripCopy& copy) {
  // Where there are no bytes there may be no memory either.
  if (copy.size == 0) return;
  for (std::size_t s = 0; s < copy.strips; ++s) {
    copy_streaming(copy.to + s * copy.to_stride, copy.from + s * copy.from_stride + copy.skip, copy.size);
  }
}

void copy_strips_and_sum(const StripCopy& copy, hash::Xxh3Stream& sum) {
  alignas(64) std::uint8_t kept[kCheckedRun];
  const std::size_t end = copy.skip + copy.size;
  for (std::size_t s = 0; s < copy.strips; ++s) {
    const std::uint8_t* from = copy.from + s * copy.from_stride;
    std::uint8_t* to = copy.to + s * copy.to_stride;
    sum.update({from, copy.skip});
    for (std::size_t at = 0, run = first_run(to, copy.size); at < copy.size;
         at += run, run = std::min(kCheckedRun, copy.size - at)) {
      copy_streaming_and_keep(to + at, kept, from + copy.skip + at, run);
      sum.update({kept, run});
    }
    sum.update({from + end, copy.from_stride - end});
  }
}

void clear_strips(std::uint8_t* to, std::size_t strips, std::size_t stride, std::size_t size) {
  if (size == 0) return;
  for (std::size_t s = 0; s < strips; ++s) std::memset(to + s * stride, 0, size);
}

}  // namespace prefixcache::gather
