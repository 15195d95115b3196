// buffer_pool.h: recycled memory for part images. Memory that was touched before is filled several times faster than
// fresh memory, so what is given back is kept, within the bound.
//
// Threads: any.
// Owns:    its memory; a Buffer returns its part when its last reference ends, and keeps the pool alive.
// Units:   bytes, rounded up to whole pages (64 KiB, or 2 MiB huge pages from 1 MiB on) and counted so.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "store/memory.h"

namespace prefixcache::store {

class Buffer;

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // `limit` bounds held(): memory in use and memory kept for reuse.
  explicit BufferPool(std::uint64_t limit, std::unique_ptr<Memory> memory = mapped_memory())
      : limit_(limit), memory_(std::move(memory)) {}
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // What a buffer of `size` bytes costs.
  static std::uint64_t rounded(std::uint64_t size);

  // Memory for `size` bytes, or null where the bound does not allow it: the caller frees something and asks again.
  std::shared_ptr<Buffer> acquire(std::uint64_t size);

  // Gives memory kept for reuse back to the system until at most `target` bytes are held.
  void trim(std::uint64_t target);
  // As trim(0), and from now on nothing is kept for reuse.
  void close();

  // A number that grows whenever memory comes back, or when notify() says that some may be had now; and a wait until it
  // is above `seen`, false where the time is up.
  std::uint64_t changes() const;
  void notify();
  bool wait_for_change(std::uint64_t seen, std::chrono::steady_clock::time_point until);
  // Memory that somebody uses now.
  std::uint64_t in_use() const;

  std::uint64_t limit() const { return limit_; }
  std::uint64_t held() const;
  std::uint64_t peak() const;

 private:
  friend class Buffer;
  void give_back(MemoryRange range);

  const std::uint64_t limit_;
  const std::unique_ptr<Memory> memory_;  // guarded by mutex_
  mutable std::mutex mutex_;
  std::uint64_t peak_ = 0;
  std::uint64_t changes_ = 0;
  std::condition_variable changed_;
  bool closed_ = false;
};

class Buffer {
 public:
  explicit Buffer(std::shared_ptr<BufferPool> pool) : pool_(std::move(pool)) {}
  ~Buffer() {
    if (range_.data != nullptr) pool_->give_back(std::move(range_));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::uint8_t* data() const { return range_.data; }
  // As counted against the pool's bound, at least what was asked for.
  std::uint64_t size() const { return range_.size; }
  // What it is a part of, and where it begins there; null where it has a mapping of its own.
  const std::shared_ptr<const Slab>& slab() const { return range_.slab; }
  std::uint64_t offset() const { return range_.offset; }

 private:
  friend class BufferPool;
  std::shared_ptr<BufferPool> pool_;
  MemoryRange range_;
};

}  // namespace prefixcache::store
