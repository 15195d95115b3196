#include "store/writer.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace prefixcache::store {
namespace {

using std::chrono::steady_clock;

// Jobs are told apart by their size.
Writer::Job job(std::uint64_t number) {
  auto image = std::make_shared<Image>();
  image->data_bytes = number;
  return image;
}

// What a writer wrote; it waits while the gate is shut.
class Sink {
 public:
  Status operator()(const Writer::Job& job) {
    std::unique_lock lock(mutex_);
    ++begun_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    written_.push_back(job->data_bytes);
    return answer_;
  }
  std::function<Status(const Writer::Job&)> function() {
    return [this](const auto& job) { return (*this)(job); };
  }
  void shut() {
    std::lock_guard lock(mutex_);
    open_ = false;
  }
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void wait_until_begun(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return begun_ >= count; });
  }
  void answer(Status status) {
    std::lock_guard lock(mutex_);
    answer_ = std::move(status);
  }
  std::vector<std::uint64_t> written() {
    std::lock_guard lock(mutex_);
    return written_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int begun_ = 0;
  Status answer_;
  std::vector<std::uint64_t> written_;
};

void push(Writer& writer, std::uint64_t number, std::uint64_t bytes = 10) {
  ASSERT_TRUE(writer.reserve(bytes, 10));
  writer.push(job(number), bytes);
}

TEST(Writer, WritesInOrderAndFlushWaits) {
  Sink sink;
  Writer writer(1000, sink.function());
  writer.start();
  for (std::uint64_t i = 1; i <= 20; ++i) push(writer, i);
  EXPECT_TRUE(writer.flush().is_ok());
  const auto written = sink.written();
  ASSERT_EQ(written.size(), 20u);
  for (std::uint64_t i = 0; i < 20; ++i) EXPECT_EQ(written[i], i + 1);
  EXPECT_EQ(writer.queued_bytes(), 0u);
  EXPECT_TRUE(writer.flush().is_ok());
}

TEST(Writer, TheBoundHoldsWhileJobsWait) {
  Sink sink;
  sink.shut();
  Writer writer(100, sink.function());
  writer.start();
  push(writer, 1, 60);
  EXPECT_FALSE(writer.reserve(101, 10)) << "can never fit: no reason to wait";
  EXPECT_FALSE(writer.reserve(41, 0.01));
  EXPECT_TRUE(writer.reserve(40, 0));
  writer.cancel(40);
  EXPECT_EQ(writer.queued_bytes(), 60u);
  sink.open();
  EXPECT_TRUE(writer.reserve(100, 10)) << "room comes when the job is done";
  writer.cancel(100);
}

TEST(Writer, AFailureIsToldOnceByFlush) {
  Sink sink;
  Writer writer(1000, sink.function());
  writer.start();
  sink.answer({StatusCode::IOError, "first", ENOSPC});
  push(writer, 1);
  EXPECT_EQ(writer.flush().message(), "first");
  EXPECT_TRUE(writer.flush().is_ok());
  sink.answer({StatusCode::IOError, "second", EIO});
  push(writer, 2);
  push(writer, 3);
  EXPECT_EQ(writer.flush().error_number(), EIO);
}

TEST(Writer, IdleRunsFirstWhenPokedAndAtTheEnd) {
  Sink sink;
  std::atomic<int> calls{0};
  std::atomic<int> written_before{-1};
  Writer writer(1000, sink.function(), [&] {
    if (calls++ == 0) written_before = static_cast<int>(sink.written().size());
    return 3600.0;
  });
  push(writer, 1);
  writer.start();
  EXPECT_TRUE(writer.flush().is_ok());
  EXPECT_EQ(written_before, 0);
  EXPECT_EQ(calls, 1);
  writer.poke();
  const auto until = steady_clock::now() + std::chrono::seconds(30);
  while (calls < 2 && steady_clock::now() < until) std::this_thread::yield();
  EXPECT_EQ(calls, 2);
  writer.stop();
  EXPECT_EQ(calls, 3);
}

TEST(Writer, IdleIsCalledAgainWhenItAsksFor) {
  Sink sink;
  std::atomic<int> calls{0};
  Writer writer(1000, sink.function(), [&] { return ++calls < 4 ? 0.001 : 3600.0; });
  writer.start();
  const auto until = steady_clock::now() + std::chrono::seconds(30);
  while (calls < 4 && steady_clock::now() < until) std::this_thread::yield();
  EXPECT_EQ(calls, 4);
}

TEST(Writer, StandsBackWhileCallersCopyUntilSomebodyWaits) {
  Sink sink;
  Writer writer(1000, sink.function());
  writer.start();
  writer.copying_begins();
  push(writer, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_TRUE(sink.written().empty());
  EXPECT_FALSE(writer.is_idle());
  EXPECT_TRUE(writer.flush().is_ok());
  EXPECT_EQ(sink.written().size(), 1u);
  push(writer, 2, 600);  // more than half full
  sink.wait_until_begun(2);
  push(writer, 3);
  writer.copying_ends();
  sink.wait_until_begun(3);
}

TEST(Writer, StopWritesWhatIsQueuedAndRefusesMore) {
  Sink sink;
  {
    Writer writer(1000, sink.function());
    writer.start();
    for (std::uint64_t i = 1; i <= 5; ++i) push(writer, i);
    writer.stop();
    EXPECT_EQ(sink.written().size(), 5u);
    EXPECT_FALSE(writer.reserve(1, 10));
    writer.stop();
  }
  EXPECT_EQ(sink.written().size(), 5u);
}

TEST(Writer, StopEndsTheWaitForRoom) {
  Sink sink;
  sink.shut();
  Writer writer(100, sink.function());
  writer.start();
  push(writer, 1, 100);
  sink.wait_until_begun(1);
  std::atomic<bool> got{true};
  std::thread caller([&] { got = writer.reserve(50, 3600); });
  std::thread stopper([&] { writer.stop(); });
  caller.join();
  EXPECT_FALSE(got);
  sink.open();
  stopper.join();
}

TEST(Writer, GivesUpOnADiskThatGivesNoSign) {
  Sink sink;
  Writer writer(1000, sink.function());
  writer.start();
  sink.shut();
  for (std::uint64_t i = 1; i <= 3; ++i) push(writer, i);
  sink.wait_until_begun(1);
  EXPECT_EQ(writer.flush(0.05).error_number(), ETIMEDOUT);
  EXPECT_EQ(writer.queued_bytes(), 30u) << "what waits still does";
  EXPECT_FALSE(writer.stop(0.05));
  EXPECT_FALSE(writer.ended());
  EXPECT_EQ(writer.abandon(), 3u);
  EXPECT_EQ(writer.queued_bytes(), 10u);
  sink.open();
  EXPECT_TRUE(writer.stop());
  EXPECT_TRUE(writer.ended());
  EXPECT_EQ(sink.written(), std::vector<std::uint64_t>{1}) << "nothing more is begun";
}

TEST(Writer, WaitsAsLongAsThereAreSigns) {
  Sink sink;
  Writer writer(1000, sink.function());
  writer.start();
  sink.shut();
  push(writer, 1);
  sink.wait_until_begun(1);
  // Looked at ten times a second; the disk answers after the twentieth time.
  std::uint64_t signs = 0;
  const auto sign = [&] {
    if (++signs == 20) sink.open();
    return signs;
  };
  EXPECT_TRUE(writer.flush(0.3, sign).is_ok());
  EXPECT_GE(signs, 20u);
  EXPECT_TRUE(writer.stop());
}

TEST(Writer, AnEndedJobIsASign) {
  Writer writer(1000, [](const auto&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    return Status::ok();
  });
  writer.start();
  for (std::uint64_t i = 1; i <= 20; ++i) push(writer, i);
  const auto start = steady_clock::now();
  EXPECT_TRUE(writer.flush(1).is_ok());
  EXPECT_GT(steady_clock::now() - start, std::chrono::seconds(1)) << "longer than it waits for one";
}

TEST(Writer, IdleThatHangsEndsNoWaitForJobsAndKeepsNobodyFromStopping) {
  Sink sink;
  std::atomic<bool> hangs{false};
  std::atomic<int> calls{0};
  Writer writer(1000, sink.function(), [&] {
    ++calls;
    while (hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 3600.0;
  });
  writer.start();
  push(writer, 1);
  EXPECT_TRUE(writer.flush().is_ok());
  hangs = true;
  writer.poke();
  const int before = calls;
  while (calls == before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_FALSE(writer.stop(0.05));
  EXPECT_EQ(writer.abandon(), 0u);
  hangs = false;
  EXPECT_TRUE(writer.stop());
}

}  // namespace
}  // namespace prefixcache::store
