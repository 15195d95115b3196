// key_chain.h: the tokens of one request and the keys of their blocks, hashed once.
//
// Threads: reading from several threads is fine; extend() needs the chain to itself.
// Owns:    its keys; its tokens are shared with whoever gave them as a TokenBuffer.
// Units:   tokens for sizes and positions.
// Errors:  std::invalid_argument for a block size below 1 or a content range that is empty or begins below 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "bindings/token_buffer.h"
#include "prefixcache/block_hash.h"

namespace prefixcache::bindings {

struct KeyChain {
  Key name_space;
  Key root;
  std::int64_t block_size = 1;
  TokenBuffer tokens;
  std::vector<ContentKey> content;  // of the whole sequence, sorted
  std::vector<Key> keys;            // of the whole blocks, in order

  // Hashes nothing yet: extend() does.
  KeyChain(std::string_view name_space_text, std::span<const Salt> salts, std::int64_t block_size,
           std::vector<ContentKey> content);

  // Adds tokens and hashes the whole blocks that became complete. Needs no GIL.
  void extend(std::span<const std::uint32_t> more);
  // Takes over `all` and hashes its whole blocks, but for those whose keys `previous` has. Needs no GIL.
  void assign(TokenBuffer all, const KeyChain* previous);

  // The tokens of block `i`; behind the last whole block, those of the tail.
  std::span<const std::uint32_t> block_tokens(std::size_t i) const;
  // The content keys that first apply in block `i` or, behind the last whole block, in the tail.
  std::vector<ContentKey> content_of_block(std::size_t i) const;
  // The key before block `i`.
  const Key& parent(std::size_t i) const { return i == 0 ? root : keys[i - 1]; }
  // Tokens behind the last whole block.
  std::size_t tail_size() const { return tokens.size() - keys.size() * static_cast<std::size_t>(block_size); }

 private:
  void hash_new_blocks();
  std::size_t blocks_in_common(const KeyChain& other) const;
};

void init_key_chain(nanobind::module_& m);

}  // namespace prefixcache::bindings
