#include "gather/fault_guard.h"

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "support/temp_dir.h"

namespace prefixcache::gather {
namespace {

constexpr std::size_t kSize = 1 << 18;

// A mapping whose file was cut to half.
class CutMapping {
 public:
  CutMapping() {
    testing::write_file(dir_ / "file", std::string(kSize, 'x'));
    const int fd = ::open((dir_ / "file").c_str(), O_RDONLY);
    data_ = static_cast<const std::uint8_t*>(::mmap(nullptr, kSize, PROT_READ, MAP_SHARED, fd, 0));
    ::close(fd);
    std::filesystem::resize_file(dir_ / "file", kSize / 2);
  }
  ~CutMapping() { ::munmap(const_cast<std::uint8_t*>(data_), kSize); }

  std::span<const std::uint8_t> all() const { return {data_, kSize}; }
  const std::uint8_t* lost() const { return data_ + kSize / 2; }

 private:
  testing::TempDir dir_;
  const std::uint8_t* data_;
};

bool copy_all(std::span<const std::uint8_t> range, std::vector<std::uint8_t>& out) {
  return run_guarded(range, [&] { std::memcpy(out.data(), range.data(), range.size()); });
}

TEST(FaultGuard, AFaultInTheRangeIsFalse) {
  ensure_fault_handler();
  const CutMapping mapping;
  std::vector<std::uint8_t> out(kSize);
  EXPECT_FALSE(copy_all(mapping.all(), out));
  EXPECT_TRUE(copy_all(mapping.all().first(kSize / 2), out));
  EXPECT_EQ(out[0], 'x');
  // The guard is as good as new after a fault.
  EXPECT_FALSE(copy_all(mapping.all(), out));
}

struct sigaction ours = {};

void call_ours(int number, siginfo_t* info, void* context) {
  ours.sa_sigaction(number, info, context);
}

// As a library does that keeps a chain of handlers: the signal is blocked while it runs.
TEST(FaultGuard, WorksAgainAfterAHandlerThatBlocksTheSignalCalledIt) {
  ensure_fault_handler();
  struct sigaction theirs = {};
  theirs.sa_sigaction = call_ours;
  theirs.sa_flags = SA_SIGINFO;
  sigfillset(&theirs.sa_mask);
  ::sigaction(SIGBUS, &theirs, &ours);
  const CutMapping mapping;
  std::vector<std::uint8_t> out(kSize);
  EXPECT_FALSE(copy_all(mapping.all(), out));
  EXPECT_FALSE(copy_all(mapping.all(), out));
  ::sigaction(SIGBUS, &ours, nullptr);
  EXPECT_FALSE(copy_all(mapping.all(), out));
}

TEST(FaultGuard, EachThreadHasItsOwn) {
  ensure_fault_handler();
  const CutMapping mapping;
  std::vector<std::uint8_t> whole(kSize, 'y');
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::uint8_t> out(kSize);
      for (int i = 0; i < 50; ++i) {
        const bool faults = (t + i) % 2 == 0;
        if (copy_all(faults ? mapping.all() : std::span<const std::uint8_t>(whole), out) == faults) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(FaultGuard, IsPutBackInFrontOfAHandlerThatCameLater) {
  ensure_fault_handler();
  std::signal(SIGBUS, SIG_DFL);
  ensure_fault_handler();
  const CutMapping mapping;
  std::vector<std::uint8_t> out(kSize);
  EXPECT_FALSE(copy_all(mapping.all(), out));
}

// The rest ends in a signal or an exit, so it runs in a process of its own.

void end_with_42(int) {
  std::_Exit(42);
}

void end_with_43(int, siginfo_t*, void*) {
  std::_Exit(43);
}

void install(void (*plain)(int), void (*with_info)(int, siginfo_t*, void*) = nullptr) {
  struct sigaction action = {};
  if (with_info != nullptr) {
    action.sa_sigaction = with_info;
    action.sa_flags = SA_SIGINFO;
  } else {
    action.sa_handler = plain;
  }
  ::sigaction(SIGBUS, &action, nullptr);
}

// Touches a page that is gone, outside of any guarded range.
void fault_elsewhere() {
  const CutMapping mapping;
  volatile std::uint8_t byte = *mapping.lost();
  (void)byte;
}

using FaultGuardDeathTest = ::testing::Test;

TEST(FaultGuardDeathTest, AFaultElsewhereGoesToTheHandlerThatWasThere) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        install(end_with_42);
        ensure_fault_handler();
        fault_elsewhere();
      },
      ::testing::ExitedWithCode(42), "");
  EXPECT_EXIT(
      {
        install(nullptr, end_with_43);
        ensure_fault_handler();
        fault_elsewhere();
      },
      ::testing::ExitedWithCode(43), "");
}

TEST(FaultGuardDeathTest, AFaultOutsideTheRangeOfARunningGuardIsPassedOnToo) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        install(end_with_42);
        ensure_fault_handler();
        const std::vector<std::uint8_t> other(100);
        run_guarded(other, [] { fault_elsewhere(); });
      },
      ::testing::ExitedWithCode(42), "");
}

TEST(FaultGuardDeathTest, WithoutAHandlerTheProcessEnds) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        std::signal(SIGBUS, SIG_DFL);
        ensure_fault_handler();
        fault_elsewhere();
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

}  // namespace
}  // namespace prefixcache::gather
