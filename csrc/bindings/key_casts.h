// key_casts.h: keys, salts and content keys between Python and C++.
//
// Threads: with the GIL.
// Errors:  ValueError for bytes of a wrong length or a purpose out of range.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "prefixcache/block_hash.h"

namespace prefixcache::bindings {

// As Python gives them: (purpose, encoded value) and (start, end, digest).
using SaltItem = std::pair<int, nanobind::bytes>;
using ContentItem = std::tuple<std::int64_t, std::int64_t, nanobind::bytes>;

inline std::span<const std::uint8_t> bytes_span(const nanobind::bytes& bytes) {
  return {static_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

inline nanobind::bytes to_bytes(const Key& key) {
  return nanobind::bytes(key.bytes.data(), key.bytes.size());
}

// `what` names the argument in the error.
Key to_key(const nanobind::bytes& bytes, const char* what);
std::vector<Salt> to_salts(const std::vector<SaltItem>& items);
std::vector<ContentKey> to_content(const std::vector<ContentItem>& items);
std::vector<ContentItem> from_content(std::span<const ContentKey> content);
nanobind::list to_list(std::span<const Key> keys);

}  // namespace prefixcache::bindings
