// block_hash.h: keys of token blocks.
//
// A key is SHA-256 over a canonical, length-prefixed encoding of a block's tokens, of the key before it and of the
// salts that first apply in it, so equal keys mean equal prefixes. Keys are the same in every process and locale.
//
// Threads: plain functions and values; any thread.
// Owns:    nothing.
// Units:   tokens for positions and counts.
// Errors:  std::invalid_argument for a block size below 1, a content range that is empty or begins below 0, a text or
//          list of 2^32 entries or more.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixcache/api.h"

namespace prefixcache {

struct Key {
  std::array<std::uint8_t, 32> bytes{};

  auto operator<=>(const Key&) const = default;
  // 64 lower-case hexadecimal digits.
  PREFIXCACHE_API std::string hex() const;
  // False, and `out` untouched, unless `text` is 64 lower-case hexadecimal digits.
  PREFIXCACHE_API static bool from_hex(std::string_view text, Key& out);
};

// What a salt is for. Equal values under different purposes give different keys.
// The numbers enter the hash: do not change.
enum class Purpose : std::uint8_t {
  tenant = 1,     // who may share (whole request)
  kv_format = 2,  // how the KV is represented (whole request)
  content = 3,    // what stands behind a range of tokens: an image, a sound
};

// A salt of the whole request. `value` is already canonically encoded by the caller.
struct Salt {
  Purpose purpose = Purpose::tenant;
  std::string value;
};

// A content key of tokens [start, end): it enters the first block that overlaps the range and, by chaining, all later
// ones.
struct ContentKey {
  std::int64_t start = 0;
  std::int64_t end = 0;
  Key digest;  // SHA-256 of the canonically encoded value

  auto operator<=>(const ContentKey&) const = default;
};

// SHA-256 of `data`.
PREFIXCACHE_API Key sha256(std::span<const std::uint8_t> data);

// The identifier of a namespace, from its text.
PREFIXCACHE_API Key namespace_id(std::string_view text);

// The parent of every first block of this namespace under these whole-request salts. The order of salts matters.
PREFIXCACHE_API Key chain_root(const Key& namespace_id, std::span<const Salt> salts);

// The key of one block. `parent` may be any bytes; `content` holds the content keys that first apply in this block, in
// any order.
PREFIXCACHE_API Key block_key(const Key& namespace_id, std::span<const std::uint8_t> parent,
                              std::span<const std::uint32_t> tokens, std::span<const ContentKey> content = {});

// Rows of one block that are needed over another reach (a window of another size, say) are stored under keys of their
// own. `group` names the reach; 0 is the block's own key. One-to-one, and its own inverse.
PREFIXCACHE_API Key group_key(const Key& key, std::uint64_t group);

// The content keys that first apply in the block of tokens [lo, hi), sorted: those with start in [lo, hi).
PREFIXCACHE_API std::vector<ContentKey> content_of_block(std::span<const ContentKey> content, std::int64_t lo,
                                                         std::int64_t hi);

// The keys of all whole blocks of `tokens`, in order: tokens.size() / block_size of them. `first_block` and `parent`
// continue a chain: `tokens` then begins at token first_block * block_size of the sequence, and `content` keeps
// positions of the whole sequence. Cost: about one SHA-256 of 4 bytes a token.
PREFIXCACHE_API std::vector<Key> chain_hashes(const Key& namespace_id, const Key& parent,
                                              std::span<const std::uint32_t> tokens, std::int64_t block_size,
                                              std::span<const ContentKey> content = {}, std::int64_t first_block = 0);

}  // namespace prefixcache

template <>
struct std::hash<prefixcache::Key> {
  std::size_t operator()(const prefixcache::Key& key) const noexcept {
    std::size_t value;  // the key is itself a uniform hash
    std::memcpy(&value, key.bytes.data(), sizeof value);
    return value;
  }
};
