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
#include <optional>
#include <thread>

#include "prefixcache/status.h"
#include "store/image.h"

namespace prefixcache::store {

class Writer {
 public:
  using Job = std::shared_ptr<Image>;

  // `write` runs on the writer's thread, one job after the other. So does `idle`, before the first job, then while
  // there is none and before the end; it answers after how many seconds it wants to be called again. They must not
  // throw.
  Writer(
      std::uint64_t limit, std::function<Status(const Job&)> write, std::function<double()> idle = [] { return 3600; });
  ~Writer();
  // Before that nothing is written. Once.
  void start();
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

  // While somebody waits for what the queue holds, the writer does not stand back.
  void hurry_begins();
  void hurry_ends();
  // Has `idle` called soon.
  void poke();
  // Numbers that change tell that the disk answers, though no job has ended.
  using Signs = std::function<std::uint64_t()>;
  static constexpr double kForever = 1e9;
  // Waits until all jobs that were queued are done. IOError (ETIMEDOUT) once no job has ended, and `signs` have not
  // changed, for so many seconds.
  Status flush(double seconds = kForever, const Signs& signs = {});
  // Writes what is queued, then ends the thread. False where that takes as long as flush() would not wait: then
  // abandon(), or wait on with another call.
  bool stop(double seconds = kForever, const Signs& signs = {});
  // After stop(): nothing more is begun. Drops what is queued; returns how many jobs come to nothing, the one under
  // way included.
  std::uint64_t abandon();
  // The thread does nothing more, or never did.
  bool ended() const;

  std::uint64_t queued_bytes() const;
  // Nothing is queued or being written.
  bool is_idle() const;
  // How long the job under way takes already; 0 if there is none.
  double seconds_at_work() const;

 private:
  void run();
  void run_idle(std::unique_lock<std::mutex>& lock);
  bool wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done, double seconds, const Signs& signs);
  bool may_start() const;

  const std::uint64_t limit_;
  const std::function<Status(const Job&)> write_;
  const std::function<double()> idle_;
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
  std::chrono::steady_clock::time_point next_idle_;
  std::optional<std::chrono::steady_clock::time_point> at_work_since_;
  Status first_error_;
  bool stopping_ = false;
  bool abandoned_ = false;
  bool ended_ = false;  // the thread does nothing more
  std::thread thread_;
};

}  // namespace prefixcache::store
