// watched_heap.h: what this thread asked the heap for. Replaces operator new: for one source file of a program.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "support/heap_limit.h"

// Not inlined, or the compiler takes free() for a mistake. All of them, since a sanitizer brings its own of each.
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  prefixcache::testing::allocated += size;
  prefixcache::testing::largest = std::max(prefixcache::testing::largest, size);
  return size > prefixcache::testing::most ? nullptr : std::malloc(size);
}
[[gnu::noinline]] void* operator new(std::size_t size) {
  if (void* memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new[](std::size_t size) {
  return operator new(size);
}
[[gnu::noinline]] void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return operator new(size, std::nothrow);
}
[[gnu::noinline]] void operator delete[](void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
