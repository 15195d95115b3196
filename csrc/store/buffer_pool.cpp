#include "store/buffer_pool.h"

#include <algorithm>

#include "gather/huge_pages.h"

namespace prefixcache::store {

namespace {

constexpr std::uint64_t kHugeFrom = 1 << 20;

}  // namespace

std::uint64_t BufferPool::rounded(std::uint64_t size) {
  const std::uint64_t page = size >= kHugeFrom ? gather::kHugePage : kMemoryPage;
  return std::max<std::uint64_t>(1, (size + page - 1) / page) * page;
}

std::shared_ptr<Buffer> BufferPool::acquire(std::uint64_t size) {
  auto buffer = std::make_shared<Buffer>(shared_from_this());
  std::lock_guard lock(mutex_);
  buffer->range_ = memory_->take(rounded(size), limit_);
  peak_ = std::max(peak_, memory_->held());
  return buffer->range_.data == nullptr ? nullptr : buffer;
}

void BufferPool::trim(std::uint64_t target) {
  std::lock_guard lock(mutex_);
  memory_->shrink(target);
}

void BufferPool::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  memory_->shrink(0);
}

void BufferPool::give_back(MemoryRange range) {
  std::lock_guard lock(mutex_);
  memory_->give_back(std::move(range));
  ++changes_;
  changed_.notify_all();
  if (closed_) memory_->shrink(0);
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
  return memory_->held() - memory_->spare();
}

std::uint64_t BufferPool::held() const {
  std::lock_guard lock(mutex_);
  return memory_->held();
}

std::uint64_t BufferPool::peak() const {
  std::lock_guard lock(mutex_);
  return peak_;
}

}  // namespace prefixcache::store
