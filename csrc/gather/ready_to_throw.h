// ready_to_throw.h: for the first lines of a thread.
#pragma once

#include <exception>

namespace prefixcache::gather {

// The C++ library asks for a thread's memory for exceptions when it throws for the first time, and ends the process
// where there is none: bad_alloc would never be caught.
inline void ready_to_throw() {
  // Volatile, or the call is left out: its answer is of no use.
  [[maybe_unused]] volatile const int none = std::uncaught_exceptions();
}

}  // namespace prefixcache::gather
