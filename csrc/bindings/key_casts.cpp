// key_casts.cpp: checked conversions of keys and salts.
#include "bindings/key_casts.h"

#include <algorithm>

namespace prefixcache::bindings {

namespace nb = nanobind;

Key to_key(const nb::bytes& bytes, const char* what) {
  Key key;
  if (bytes.size() != key.bytes.size()) {
    throw nb::value_error((std::string(what) + " must be 32 bytes, not " + std::to_string(bytes.size())).c_str());
  }
  const auto span = bytes_span(bytes);
  std::copy(span.begin(), span.end(), key.bytes.begin());
  return key;
}

std::vector<Salt> to_salts(const std::vector<SaltItem>& items) {
  std::vector<Salt> salts;
  for (const auto& [purpose, value] : items) {
    if (purpose != static_cast<int>(Purpose::tenant) && purpose != static_cast<int>(Purpose::kv_format)) {
      throw nb::value_error(
          ("the purpose of a salt must be tenant (1) or kv_format (2), not " + std::to_string(purpose)).c_str());
    }
    salts.push_back({static_cast<Purpose>(purpose), std::string(value.c_str(), value.size())});
  }
  return salts;
}

std::vector<ContentKey> to_content(const std::vector<ContentItem>& items) {
  std::vector<ContentKey> content;
  content.reserve(items.size());
  for (const auto& [start, end, digest] : items) content.push_back({start, end, to_key(digest, "a content digest")});
  return content;
}

std::vector<ContentItem> from_content(std::span<const ContentKey> content) {
  std::vector<ContentItem> items;
  items.reserve(content.size());
  for (const ContentKey& key : content) items.emplace_back(key.start, key.end, to_bytes(key.digest));
  return items;
}

nb::list to_list(std::span<const Key> keys) {
  nb::list list;
  for (const Key& key : keys) list.append(to_bytes(key));
  return list;
}

}  // namespace prefixcache::bindings
