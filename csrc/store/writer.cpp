#include "store/writer.h"

#include <algorithm>
#include <cerrno>

#include "gather/ready_to_throw.h"

namespace prefixcache::store {

namespace {

using Clock = std::chrono::steady_clock;

// A burst of puts leaves gaps shorter than this.
constexpr auto kQuiet = std::chrono::milliseconds(4);
// What pokes come for is done together.
constexpr auto kPoke = std::chrono::milliseconds(50);
// A queue that is never empty puts idle() off for so long at most.
constexpr auto kOverdue = std::chrono::seconds(1);
// Signs of life are looked for so often.
constexpr double kGlance = 0.1;

}  // namespace

Writer::Writer(std::uint64_t limit, std::function<Status(const Job&)> write, std::function<double()> idle)
    : limit_(limit), write_(std::move(write)), idle_(std::move(idle)) {}

Writer::~Writer() {
  stop();
}

void Writer::start() {
  thread_ = std::thread([this] { run(); });
}

bool Writer::reserve(std::uint64_t bytes, double seconds) {
  std::unique_lock lock(mutex_);
  if (bytes > limit_) return false;
  ++waiting_;
  wake_.notify_all();
  const auto room = [&] { return stopping_ || reserved_ + bytes <= limit_; };
  const bool in_time = done_.wait_for(lock, std::chrono::duration<double>(seconds), room);
  --waiting_;
  if (!in_time || stopping_) return false;
  reserved_ += bytes;
  return true;
}

void Writer::cancel(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  reserved_ -= bytes;
  done_.notify_all();
}

void Writer::push(Job job, std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  queue_.emplace_back(std::move(job), bytes);
  ++pushed_;
  wake_.notify_all();
}

void Writer::copying_begins() {
  std::lock_guard lock(mutex_);
  ++copying_;
}

void Writer::copying_ends() {
  std::lock_guard lock(mutex_);
  --copying_;
  last_copy_ = Clock::now();
  wake_.notify_all();
}

void Writer::hurry_begins() {
  std::lock_guard lock(mutex_);
  ++waiting_;
  wake_.notify_all();
}

void Writer::hurry_ends() {
  std::lock_guard lock(mutex_);
  --waiting_;
}

void Writer::poke() {
  std::lock_guard lock(mutex_);
  next_idle_ = std::min(next_idle_, Clock::now() + kPoke);
  wake_.notify_all();
}

bool Writer::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done, double seconds,
                  const Signs& signs) {
  const auto alive = [&] { return std::pair(finished_, signs ? signs() : 0); };
  auto seen = alive();
  for (auto since = Clock::now(); !done();) {
    if (const auto now = alive(); now != seen) {
      seen = now;
      since = Clock::now();
    }
    const double left = seconds - std::chrono::duration<double>(Clock::now() - since).count();
    if (left <= 0) return false;
    done_.wait_for(lock, std::chrono::duration<double>(std::min(left, kGlance)));
  }
  return true;
}

Status Writer::flush(double seconds, const Signs& signs) {
  std::unique_lock lock(mutex_);
  const std::uint64_t target = pushed_;
  ++waiting_;
  wake_.notify_all();
  const bool in_time = wait(lock, [&] { return finished_ >= target || ended_; }, seconds, signs);
  --waiting_;
  if (!in_time) return {StatusCode::IOError, "the disk does not answer in time", ETIMEDOUT};
  return std::exchange(first_error_, Status::ok());
}

bool Writer::stop(double seconds, const Signs& signs) {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
    done_.notify_all();
    if (thread_.joinable() && !wait(lock, [&] { return ended_; }, seconds, signs)) return false;
  }
  if (thread_.joinable()) thread_.join();
  return true;
}

std::uint64_t Writer::abandon() {
  std::deque<std::pair<Job, std::uint64_t>> dropped;  // let go without the mutex
  std::lock_guard lock(mutex_);
  abandoned_ = true;
  dropped.swap(queue_);
  for (const auto& [job, bytes] : dropped) reserved_ -= bytes;
  const std::uint64_t lost = pushed_ - finished_;
  finished_ += dropped.size();
  done_.notify_all();
  return lost;
}

bool Writer::ended() const {
  std::lock_guard lock(mutex_);
  return ended_ || !thread_.joinable();
}

std::uint64_t Writer::queued_bytes() const {
  std::lock_guard lock(mutex_);
  return reserved_;
}

bool Writer::is_idle() const {
  std::lock_guard lock(mutex_);
  return finished_ == pushed_;
}

double Writer::seconds_at_work() const {
  std::lock_guard lock(mutex_);
  return at_work_since_ ? std::chrono::duration<double>(Clock::now() - *at_work_since_).count() : 0;
}

bool Writer::may_start() const {
  if (stopping_ || waiting_ > 0 || reserved_ > limit_ / 2) return true;
  return copying_ == 0 && Clock::now() - last_copy_ >= kQuiet;
}

void Writer::run_idle(std::unique_lock<std::mutex>& lock) {
  // Pokes of this very moment count for the next time.
  next_idle_ = Clock::now() + std::chrono::hours(1000);
  lock.unlock();
  const double seconds = std::clamp(idle_(), 0.0, 1e6);
  lock.lock();
  const auto pause = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  next_idle_ = std::min(next_idle_, Clock::now() + pause);
}

void Writer::run() {
  gather::ready_to_throw();
  std::unique_lock lock(mutex_);
  bool said_good_bye = false;
  run_idle(lock);
  for (;;) {
    while (!queue_.empty() && !may_start()) wake_.wait_for(lock, kQuiet);
    if (queue_.empty()) {
      if (stopping_ && !said_good_bye && !abandoned_) {
        said_good_bye = true;
        run_idle(lock);
        continue;
      }
      if (stopping_) {
        ended_ = true;
        done_.notify_all();
        return;
      }
      if (Clock::now() >= next_idle_) {
        run_idle(lock);
      } else {
        wake_.wait_until(lock, next_idle_);
      }
      continue;
    }
    if (next_idle_ < Clock::now() - kOverdue) run_idle(lock);
    auto [job, bytes] = std::move(queue_.front());
    queue_.pop_front();
    at_work_since_ = Clock::now();
    lock.unlock();
    Status status = write_(job);
    job.reset();
    lock.lock();
    at_work_since_.reset();
    reserved_ -= bytes;
    ++finished_;
    // Reaching the disk cap is no error: it is what the cap is for.
    const bool failed = !status.is_ok() && status.code() != StatusCode::Full;
    if (failed && first_error_.is_ok()) first_error_ = std::move(status);
    done_.notify_all();
  }
}

}  // namespace prefixcache::store
