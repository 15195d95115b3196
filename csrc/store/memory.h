// memory.h: where a pool's memory comes from: mappings of its own for each piece, or a few large arrays of MLX's that a
// kernel can read.
//
// Threads: none of its own: the pool's mutex guards every call. A slab may be let go by any thread.
// Owns:    all that it holds and nobody uses. Whoever uses memory keeps its slab alive.
// Units:   bytes; sizes and offsets are multiples of kMemoryPage.
// Errors:  no memory is a range without data, never an exception of MLX's.
#pragma once

#include <cstdint>
#include <memory>

#include <mlx/array.h>

namespace prefixcache::store {

inline constexpr std::uint64_t kMemoryPage = 64 << 10;

// Written by CPU threads, read by them and by kernels.
struct Slab {
  mlx::core::array memory;  // uint8 [pages, kMemoryPage]
  std::uint64_t bytes = 0;
  std::uint8_t* data = nullptr;
  std::uint64_t number = 0;  // the later it was made, the higher
};

struct MemoryRange {
  std::uint8_t* data = nullptr;
  std::uint64_t size = 0;
  std::shared_ptr<const Slab> slab;  // null for a mapping of its own
  std::uint64_t offset = 0;          // in its slab
};

class Memory {
 public:
  Memory() = default;
  virtual ~Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // At least `want` bytes such that held() stays within `limit`. What nobody uses may be given up for it.
  virtual MemoryRange take(std::uint64_t want, std::uint64_t limit) = 0;
  // Keeps it for the next one. Where the heap has nothing left to remember it by, it is given up, or it and what was
  // free beside it stay out of use until the store ends.
  virtual void give_back(MemoryRange range) noexcept = 0;
  // Gives up what nobody uses until at most `most` bytes are held.
  virtual void shrink(std::uint64_t most) = 0;

  // All memory of the system's or MLX's, and what of it nobody uses.
  virtual std::uint64_t held() const = 0;
  virtual std::uint64_t spare() const = 0;
};

// A mapping for each piece, of huge pages where it is large. Pieces are recycled whole.
std::unique_ptr<Memory> mapped_memory();
// Pieces of slabs, each an eighth of the limit or as large as its first piece. A slab is given up when none of it is in
// use; until then all of it counts as held.
std::unique_ptr<Memory> slab_memory();

}  // namespace prefixcache::store
