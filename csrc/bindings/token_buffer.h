// token_buffer.h: tokens from any Python container of integers, as one run of 32-bit numbers.
//
// Threads: a TokenBuffer never changes and may be read from any thread. to_tokens() needs the GIL.
// Owns:    a TokenBuffer shares its memory with its slices and copies; append() adds behind the part that others see.
// Errors:  to_tokens() throws ValueError (a token out of range, with its position) or TypeError (not integers).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include <nanobind/nanobind.h>

namespace prefixcache::bindings {

class TokenBuffer {
 public:
  TokenBuffer() = default;
  // Room for `size` tokens, not filled: fill them through writable() before anybody else sees the buffer.
  explicit TokenBuffer(std::size_t size);

  std::size_t size() const { return size_; }
  const std::uint32_t* data() const { return data_; }
  std::span<const std::uint32_t> span() const { return {data_, size_}; }
  std::uint32_t* writable() { return data_; }

  // Tokens [lo, hi), without a copy. REQUIRES: lo <= hi <= size().
  TokenBuffer slice(std::size_t lo, std::size_t hi) const;
  // This and then `more`. Copies `more` alone where the memory has room behind this buffer.
  TokenBuffer append(std::span<const std::uint32_t> more) const;
  // How many tokens are equal from position `start` of both on.
  std::size_t common_run(const TokenBuffer& other, std::size_t start) const;

 private:
  struct Storage {
    std::unique_ptr<std::uint32_t[]> tokens;
    std::size_t capacity = 0;
    std::atomic<std::size_t> used{0};  // what is behind it belongs to whoever moves it forward
  };

  std::shared_ptr<Storage> storage_;
  std::uint32_t* data_ = nullptr;
  std::size_t size_ = 0;
};

// Takes a TokenBuffer (shared, not copied), a list or other sequence of integers, an MLX array, or a one-dimensional
// buffer of integers (array.array, numpy, memoryview). An MLX array that is not evaluated is evaluated here.
TokenBuffer to_tokens(nanobind::handle tokens);

void init_token_buffer(nanobind::module_& m);

}  // namespace prefixcache::bindings
