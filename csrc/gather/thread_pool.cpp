#include "gather/thread_pool.h"

#include <algorithm>
#include <system_error>

#include "gather/ready_to_throw.h"

namespace prefixcache::gather {

ThreadPool::ThreadPool(int threads) {
  if (threads <= 0) threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 8);
  workers_.reserve(static_cast<std::size_t>(threads));
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    // The system has no more: those that there are do it all.
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run(Loop& loop) {
  for (;;) {
    const std::size_t i = loop.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= loop.count) return;
    try {
      (*loop.body)(i);
    } catch (...) {
      if (!loop.failed.test_and_set()) loop.error = std::current_exception();
    }
  }
}

void ThreadPool::parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) {
  if (count <= 1 || workers_.empty()) {
    for (std::size_t i = 0; i < count; ++i) body(i);
    return;
  }
  Loop loop(body, count);
  {
    std::lock_guard lock(mutex_);
    loops_.push_back(&loop);
  }
  wake_.notify_all();
  run(loop);
  std::unique_lock lock(mutex_);
  std::erase(loops_, &loop);
  done_.wait(lock, [&] { return loop.running.load() == 0; });
  lock.unlock();
  if (loop.error) std::rethrow_exception(loop.error);
}

void ThreadPool::work() {
  ready_to_throw();
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || !loops_.empty(); });
    if (stopping_) return;
    Loop& loop = *loops_.front();
    ++loop.running;
    lock.unlock();
    run(loop);
    lock.lock();
    // All items are taken: nobody else needs to see this loop.
    std::erase(loops_, &loop);
    if (--loop.running == 0) done_.notify_all();
  }
}

}  // namespace prefixcache::gather
