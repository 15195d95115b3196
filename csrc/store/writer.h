// writer.h: the thread that brings images to the disk.
//
// Threads: any.
// Owns:    its thread and its queue, bounded in bytes.
// Units:   bytes, seconds.
// Errors:  the first failed write since the last flush() is kept for that flush().
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "prefixcache/status.h"
#include "store/image.h"

namespace prefixcache::store {

class Writer {
 public:
  using Job = std::shared_ptr<Image>;

  // `write` runs on the writer's thread, one job after the other. It must not throw.
  Writer(std::uint64_t limit, std::function<Status(const Job&)> write);
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Counts `bytes` against the bound, waiting for room; false where there was none in time, or after stop().
  bool reserve(std::uint64_t bytes, double seconds);
  void cancel(std::uint64_t bytes);
  // Queues a job whose bytes were reserved.
  void push(Job job, std::uint64_t bytes);

  // While copies of callers run, the writer stands back as long as its queue is less than half full: on a small
  // machine it would take a core and memory bandwidth from them.
  void copying_begins();
  void copying_ends();

  // Waits until one job, or all that were queued, are done. wait_one is false at once where nothing is queued.
  bool wait_one(std::chrono::steady_clock::time_point until);
  Status flush();
  // Writes what is queued, then ends the thread. Safe to call twice.
  void stop();

  std::uint64_t queued_bytes() const;

 private:
  void run();
  bool may_start() const;

  const std::uint64_t limit_;
  const std::function<Status(const Job&)> write_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<std::pair<Job, std::uint64_t>> queue_;
  std::uint64_t reserved_ = 0;  // queued, being written, or about to be queued
  std::uint64_t finished_ = 0;  // jobs
  std::uint64_t pushed_ = 0;    // jobs
  int copying_ = 0;
  int waiting_ = 0;  // callers that need the queue to move
  std::chrono::steady_clock::time_point last_copy_;
  Status first_error_;
  bool stopping_ = false;
  bool ended_ = false;  // the thread does nothing more
  std::thread thread_;
};

}  // namespace prefixcache::store
