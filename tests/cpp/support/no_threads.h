// no_threads.h: a system that has no thread to give.
#pragma once

#include <cstddef>
#include <stdexcept>

#include <pthread.h>

namespace prefixcache::testing {

#ifdef __GLIBC__

inline constexpr bool kCanRefuseThreads = true;

// While it lives no thread can be started: each would want a stack as large as the address space.
class NoThreads {
 public:
  NoThreads() {
    pthread_attr_t huge;
    if (::pthread_getattr_default_np(&before_) != 0 || ::pthread_attr_init(&huge) != 0 ||
        ::pthread_attr_setstacksize(&huge, std::size_t{1} << 47) != 0 || ::pthread_setattr_default_np(&huge) != 0) {
      throw std::runtime_error("the size of stacks cannot be set");
    }
    ::pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    ::pthread_setattr_default_np(&before_);
    ::pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

#else

inline constexpr bool kCanRefuseThreads = false;
class NoThreads {};

#endif

}  // namespace prefixcache::testing
