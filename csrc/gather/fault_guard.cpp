#include "gather/fault_guard.h"

#include <atomic>
#include <csignal>
#include <mutex>

#include <pthread.h>
#include <signal.h>

namespace prefixcache::gather {

namespace {

// In place from each thread's start: where memory for them is asked for at their first use and there is none, the C
// library ends the process.
[[gnu::tls_model("initial-exec")]] thread_local detail::GuardFrame* current = nullptr;
[[gnu::tls_model("initial-exec")]] thread_local bool passing_on = false;

std::mutex install_mutex;
struct sigaction previous_action = {};

void pass_on(int number, siginfo_t* info, void* context) {
  // A handler that calls back to us would loop: then nobody wants it, and the default ends the process.
  if (!passing_on && (previous_action.sa_flags & SA_SIGINFO) != 0 && previous_action.sa_sigaction != nullptr) {
    passing_on = true;
    previous_action.sa_sigaction(number, info, context);
    passing_on = false;
    return;
  }
  if (!passing_on && (previous_action.sa_flags & SA_SIGINFO) == 0 && previous_action.sa_handler != SIG_DFL &&
      previous_action.sa_handler != SIG_IGN) {
    passing_on = true;
    previous_action.sa_handler(number);
    passing_on = false;
    return;
  }
  std::signal(number, SIG_DFL);
  std::raise(number);
}

void on_fault(int number, siginfo_t* info, void* context) {
  const auto* address = static_cast<const std::uint8_t*>(info->si_addr);
  detail::GuardFrame* frame = current;
  if (frame != nullptr && address >= frame->lo && address < frame->hi) {
    // Whoever calls this on our behalf may have blocked the signal, and the next fault would end the process.
    ::pthread_sigmask(SIG_SETMASK, &static_cast<const ucontext_t*>(context)->uc_sigmask, nullptr);
    siglongjmp(frame->env, 1);
  }
  pass_on(number, info, context);
}

}  // namespace

namespace detail {
void enter(GuardFrame& frame) {
  current = &frame;
  // The body must not be moved before the frame is in place.
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void leave() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  current = nullptr;
}
}  // namespace detail

void ensure_fault_handler() {
  struct sigaction now = {};
  if (::sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_fault) {
    return;
  }
  std::lock_guard lock(install_mutex);
  ::sigaction(SIGBUS, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_fault) return;
  previous_action = now;
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  sigemptyset(&ours.sa_mask);
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  ::sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace prefixcache::gather
