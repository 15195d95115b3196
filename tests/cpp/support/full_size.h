// full_size.h: whether tests that come in two sizes run at the larger one, as make test-long asks for.
#pragma once

#include <chrono>
#include <cstdlib>

namespace prefixcache::testing {

inline bool at_full_size() {
  const char* asked = std::getenv("PREFIXCACHE_TEST_FULL");
  return asked != nullptr && *asked == '1';
}

inline std::chrono::seconds stress_time() {
  return std::chrono::seconds(at_full_size() ? 60 : 2);
}

}  // namespace prefixcache::testing
