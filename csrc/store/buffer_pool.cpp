#include "store/buffer_pool.h"

#include <algorithm>

#include <sys/mman.h>

#include "gather/huge_pages.h"

namespace prefixcache::store {

namespace {

constexpr std::uint64_t kSmallPage = 64 << 10;
constexpr std::uint64_t kHugeFrom = 1 << 20;

// Fresh zeroed memory, on a huge page boundary where it is made of huge pages; null if there is none.
std::uint8_t* map_memory(std::uint64_t size) {
  const std::uint64_t slack = size % gather::kHugePage == 0 ? gather::kHugePage : 0;
  void* address = ::mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  auto* data = static_cast<std::uint8_t*>(address);
  if (slack != 0) {
    const std::uint64_t before = (slack - reinterpret_cast<std::uintptr_t>(data) % slack) % slack;
    if (before != 0) ::munmap(data, before);
    data += before;
    if (before != slack) ::munmap(data + size, slack - before);
    gather::advise_huge_pages(data, size);
  }
  return data;
}

}  // namespace

std::uint64_t BufferPool::rounded(std::uint64_t size) {
  const std::uint64_t page = size >= kHugeFrom ? gather::kHugePage : kSmallPage;
  return std::max<std::uint64_t>(1, (size + page - 1) / page) * page;
}

BufferPool::~BufferPool() {
  for (const auto& [size, data] : spares_) ::munmap(data, size);
}

std::shared_ptr<Buffer> BufferPool::acquire(std::uint64_t size) {
  const std::uint64_t want = rounded(size);
  std::lock_guard lock(mutex_);
  // A spare up to a quarter too large is better than fresh memory.
  if (const auto found = spares_.lower_bound(want); found != spares_.end() && found->first <= want + want / 4) {
    const auto [had, data] = *found;
    spares_.erase(found);
    spare_bytes_ -= had;
    return std::make_shared<Buffer>(shared_from_this(), data, had);
  }
  if (want > limit_) return nullptr;
  drop_spares_above(limit_ - want);
  if (held_ + want > limit_) return nullptr;
  std::uint8_t* data = map_memory(want);
  if (data == nullptr) return nullptr;
  held_ += want;
  peak_ = std::max(peak_, held_);
  return std::make_shared<Buffer>(shared_from_this(), data, want);
}

void BufferPool::trim(std::uint64_t target) {
  std::lock_guard lock(mutex_);
  drop_spares_above(target);
}

void BufferPool::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  drop_spares_above(0);
}

void BufferPool::drop_spares_above(std::uint64_t most) {
  while (held_ > most && !spares_.empty()) {
    const auto largest = std::prev(spares_.end());
    ::munmap(largest->second, largest->first);
    held_ -= largest->first;
    spare_bytes_ -= largest->first;
    spares_.erase(largest);
  }
}

void BufferPool::give_back(std::uint8_t* data, std::uint64_t size) {
  std::lock_guard lock(mutex_);
  spares_.emplace(size, data);
  spare_bytes_ += size;
  ++changes_;
  changed_.notify_all();
  if (closed_) drop_spares_above(0);
}

std::uint64_t BufferPool::changes() const {
  std::lock_guard lock(mutex_);
  return changes_;
}

void BufferPool::notify() {
  std::lock_guard lock(mutex_);
  ++changes_;
  changed_.notify_all();
}

bool BufferPool::wait_for_change(std::uint64_t seen, std::chrono::steady_clock::time_point until) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, until, [&] { return changes_ > seen; });
}

std::uint64_t BufferPool::in_use() const {
  std::lock_guard lock(mutex_);
  return held_ - spare_bytes_;
}

std::uint64_t BufferPool::held() const {
  std::lock_guard lock(mutex_);
  return held_;
}

std::uint64_t BufferPool::peak() const {
  std::lock_guard lock(mutex_);
  return peak_;
}

}  // namespace prefixcache::store
