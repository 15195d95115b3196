// block_hash.cpp: the canonical encoding behind every key.
//
// The encoding is on disk by way of the keys: change one byte and every stored block is lost. Golden vectors
// (tests/golden/block_hash_v1.json) guard it. Numbers are little-endian, everything of variable size has its length
// before it, and a 16-byte tag says what follows:
//
//   namespace  "prefixcache.n.v1"  u32 length, text
//   root       "prefixcache.r.v1"  namespace id (32), u32 salts, each: u8 purpose, u32 length, value
//   block      "prefixcache.b.v1"  namespace id (32), 16 zero bytes,
//                                  u32 length, parent, u32 tokens, each u32,
//                                  u32 content keys, each: i64 start, i64 end, digest (32)
//
// Content keys are sorted, equal ones count once. The first 64 bytes of a block, one round of SHA-256, are the same for
// a whole chain and are hashed once.
#include "prefixcache/block_hash.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "hash/encode.h"
#include "hash/sha256.h"

namespace prefixcache {

namespace {

using hash::Sha256;

constexpr std::string_view kNamespaceTag = "prefixcache.n.v1";
constexpr std::string_view kRootTag = "prefixcache.r.v1";
constexpr std::string_view kBlockTag = "prefixcache.b.v1";
static_assert(kNamespaceTag.size() == 16 && kRootTag.size() == 16 && kBlockTag.size() == 16);

std::uint32_t checked_length(std::size_t size, const char* what) {
  if (size > std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument(std::string(what) + " is too long: " + std::to_string(size));
  }
  return static_cast<std::uint32_t>(size);
}

// Sorted, each once, every range checked.
std::vector<ContentKey> canonical(std::span<const ContentKey> content) {
  for (const ContentKey& key : content) {
    if (key.start < 0 || key.end <= key.start) {
      throw std::invalid_argument("content range [" + std::to_string(key.start) + ", " + std::to_string(key.end) +
                                  ") must not be empty and must not begin below 0");
    }
  }
  std::vector<ContentKey> sorted(content.begin(), content.end());
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  return sorted;
}

class BlockHasher {
 public:
  explicit BlockHasher(const Key& namespace_id) {
    std::array<std::uint8_t, 64> head{};
    std::copy(kBlockTag.begin(), kBlockTag.end(), head.begin());
    std::copy(namespace_id.bytes.begin(), namespace_id.bytes.end(), head.begin() + kBlockTag.size());
    midstate_.update(head);
  }

  // `content` is canonical.
  Key operator()(std::span<const std::uint8_t> parent, std::span<const std::uint32_t> tokens,
                 std::span<const ContentKey> content) const {
    Sha256 sha = midstate_;
    hash::add_le(sha, checked_length(parent.size(), "parent"));
    sha.update(parent);
    hash::add_le(sha, checked_length(tokens.size(), "block"));
    hash::add_tokens(sha, tokens);
    hash::add_le(sha, checked_length(content.size(), "list of content keys"));
    for (const ContentKey& key : content) {
      hash::add_le(sha, key.start);
      hash::add_le(sha, key.end);
      sha.update(key.digest.bytes);
    }
    return sha.finish();
  }

 private:
  Sha256 midstate_;
};

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::string Key::hex() const {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::uint8_t byte : bytes) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

bool Key::from_hex(std::string_view text, Key& out) {
  Key key;
  if (text.size() != 2 * key.bytes.size()) return false;
  for (std::size_t i = 0; i < key.bytes.size(); ++i) {
    const int high = hex_digit(text[2 * i]);
    const int low = hex_digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    key.bytes[i] = static_cast<std::uint8_t>(high << 4 | low);
  }
  out = key;
  return true;
}

Key sha256(std::span<const std::uint8_t> data) {
  Sha256 sha;
  sha.update(data);
  return sha.finish();
}

Key namespace_id(std::string_view text) {
  Sha256 sha;
  sha.update(hash::as_bytes(kNamespaceTag));
  hash::add_le(sha, checked_length(text.size(), "namespace"));
  sha.update(hash::as_bytes(text));
  return sha.finish();
}

Key chain_root(const Key& namespace_id, std::span<const Salt> salts) {
  Sha256 sha;
  sha.update(hash::as_bytes(kRootTag));
  sha.update(namespace_id.bytes);
  hash::add_le(sha, checked_length(salts.size(), "list of salts"));
  for (const Salt& salt : salts) {
    hash::add_le(sha, static_cast<std::uint8_t>(salt.purpose));
    hash::add_le(sha, checked_length(salt.value.size(), "salt"));
    sha.update(hash::as_bytes(salt.value));
  }
  return sha.finish();
}

Key block_key(const Key& namespace_id, std::span<const std::uint8_t> parent, std::span<const std::uint32_t> tokens,
              std::span<const ContentKey> content) {
  return BlockHasher(namespace_id)(parent, tokens, canonical(content));
}

Key group_key(const Key& key, std::uint64_t group) {
  // Keys are uniform, so that a fixed difference between those of two groups makes them no less unlikely to meet. It
  // goes into the first bytes, which file names and folders show.
  Key result = key;
  for (std::size_t i = 0; i < sizeof group; ++i) result.bytes[i] ^= static_cast<std::uint8_t>(group >> (8 * i));
  return result;
}

std::vector<ContentKey> content_of_block(std::span<const ContentKey> content, std::int64_t lo, std::int64_t hi) {
  std::vector<ContentKey> first_here;
  for (const ContentKey& key : content) {
    if (key.start >= lo && key.start < hi) first_here.push_back(key);
  }
  return canonical(first_here);
}

std::vector<Key> chain_hashes(const Key& namespace_id, const Key& parent, std::span<const std::uint32_t> tokens,
                              std::int64_t block_size, std::span<const ContentKey> content, std::int64_t first_block) {
  if (block_size < 1) {
    throw std::invalid_argument("block_size must be at least 1, not " + std::to_string(block_size));
  }
  const std::size_t step = static_cast<std::size_t>(block_size);
  const std::size_t count = tokens.size() / step;
  constexpr std::int64_t kLastPosition = std::numeric_limits<std::int64_t>::max();
  if (first_block < 0 || first_block > (kLastPosition - static_cast<std::int64_t>(tokens.size())) / block_size) {
    throw std::invalid_argument("first_block is out of range: " + std::to_string(first_block));
  }

  const BlockHasher hash_block(namespace_id);
  const std::vector<ContentKey> sorted = canonical(content);
  const auto before = [](const ContentKey& key, std::int64_t position) { return key.start < position; };
  std::int64_t position = first_block * block_size;
  auto next = std::lower_bound(sorted.begin(), sorted.end(), position, before);

  std::vector<Key> keys;
  keys.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    position += block_size;
    const auto end = std::lower_bound(next, sorted.end(), position, before);
    const Key& above = keys.empty() ? parent : keys.back();
    keys.push_back(hash_block(above.bytes, tokens.subspan(i * step, step), {next, end}));
    next = end;
  }
  return keys;
}

}  // namespace prefixcache
