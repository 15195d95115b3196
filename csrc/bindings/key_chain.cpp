// key_chain.cpp: what KeyChain hashes and what it takes over from the chain before.
#include "bindings/key_chain.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace prefixcache::bindings {

KeyChain::KeyChain(std::string_view name_space_text, std::span<const Salt> salts, std::int64_t block_size,
                   std::vector<ContentKey> content)
    : name_space(namespace_id(name_space_text)),
      root(chain_root(name_space, salts)),
      block_size(block_size),
      content(prefixcache::content_of_block(content, std::numeric_limits<std::int64_t>::min(),
                                            std::numeric_limits<std::int64_t>::max())) {
  // Refuses a bad block size even where there is no token.
  chain_hashes(name_space, root, {}, block_size);
}

void KeyChain::extend(std::span<const std::uint32_t> more) {
  tokens = tokens.append(more);
  hash_new_blocks();
}

void KeyChain::assign(TokenBuffer all, const KeyChain* previous) {
  tokens = std::move(all);
  keys.clear();
  if (previous != nullptr) {
    keys.assign(previous->keys.begin(), previous->keys.begin() + blocks_in_common(*previous));
  }
  hash_new_blocks();
}

void KeyChain::hash_new_blocks() {
  const std::size_t done = keys.size();
  const std::vector<Key> fresh =
      chain_hashes(name_space, parent(done), tokens.span().subspan(done * static_cast<std::size_t>(block_size)),
                   block_size, content, static_cast<std::int64_t>(done));
  keys.insert(keys.end(), fresh.begin(), fresh.end());
}

std::size_t KeyChain::blocks_in_common(const KeyChain& other) const {
  if (root != other.root || block_size != other.block_size) return 0;
  // A block is the same if its tokens are and no content key that differs begins in it or before.
  std::size_t equal = tokens.common_run(other.tokens, 0);
  const auto [mine, theirs] = std::mismatch(content.begin(), content.end(), other.content.begin(), other.content.end());
  if (mine != content.end()) equal = std::min(equal, static_cast<std::size_t>(mine->start));
  if (theirs != other.content.end()) equal = std::min(equal, static_cast<std::size_t>(theirs->start));
  return equal / static_cast<std::size_t>(block_size);
}

std::span<const std::uint32_t> KeyChain::block_tokens(std::size_t i) const {
  const std::size_t step = static_cast<std::size_t>(block_size);
  return i < keys.size() ? tokens.span().subspan(i * step, step) : tokens.span().subspan(i * step);
}

std::vector<ContentKey> KeyChain::content_of_block(std::size_t i) const {
  const std::int64_t lo = static_cast<std::int64_t>(i) * block_size;
  return prefixcache::content_of_block(content, lo, lo + static_cast<std::int64_t>(block_tokens(i).size()));
}

}  // namespace prefixcache::bindings
