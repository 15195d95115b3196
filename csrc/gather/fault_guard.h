// fault_guard.h: reading a mapped file that may shrink or fail.
//
// A load from a page that the file no longer backs raises SIGBUS. run_guarded turns a SIGBUS whose address lies in the
// given range, on the thread that runs the body, into `false`; every other one goes to the handler that was there
// before. The handler is installed on first use and put back in front if somebody replaced it.
//
// Threads: any; the guard belongs to the calling thread. Guards do not nest.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <span>

namespace prefixcache::gather {

namespace detail {
struct GuardFrame {
  sigjmp_buf env;
  const std::uint8_t* lo = nullptr;
  const std::uint8_t* hi = nullptr;
};
void enter(GuardFrame& frame);
void leave();
}  // namespace detail

// Puts our handler in front. Called by run_guarded's users once an operation; cheap when nothing changed.
void ensure_fault_handler();

// Runs `body`; false if it faulted in `range`. The body is abandoned where it faulted, so it must own nothing that
// needs a destructor: plain copies and checksums of memory only.
template <typename Body>
bool run_guarded(std::span<const std::uint8_t> range, Body&& body) {
  detail::GuardFrame frame;
  frame.lo = range.data();
  frame.hi = range.data() + range.size();
  // The signal mask is not saved (a system call): the handler puts it back.
  if (sigsetjmp(frame.env, 0) != 0) {
    detail::leave();
    return false;
  }
  detail::enter(frame);
  body();
  detail::leave();
  return true;
}

}  // namespace prefixcache::gather
