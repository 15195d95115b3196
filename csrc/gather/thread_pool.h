// thread_pool.h: a few threads that share the items of a loop with the caller.
//
// Threads: parallel_for may be called from several threads at once; their loops share the workers.
// Owns:    its threads, joined by the destructor. Bodies see bytes only, never MLX.
// Errors:  what a body throws is thrown by its parallel_for, after all other items have ended; the first one wins.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace prefixcache::gather {

class ThreadPool {
 public:
  // `threads` counts the caller: threads - 1 are started. 0: one for each core, at most 8.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs body(i) for every i in [0, count), the caller helping, and returns when all have ended.
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body);

 private:
  struct Loop {
    Loop(const std::function<void(std::size_t)>& b, std::size_t n) : body(&b), count(n) {}
    const std::function<void(std::size_t)>* body;
    std::size_t count;
    std::atomic<std::size_t> next{0};
    std::atomic<std::size_t> running{0};  // workers inside
    std::atomic_flag failed;
    std::exception_ptr error;  // set by whoever set `failed`
  };

  void work();
  static void run(Loop& loop);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<Loop*> loops_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace prefixcache::gather
