#include <limits>
#include <stdexcept>

#include "layout/block_file.h"
#include "layout/text.h"

namespace prefixcache::layout {
namespace {

// <64 hex key>-<16 hex parent>-<depth>.<part>.safetensors
constexpr std::string_view kSuffix = ".safetensors";
constexpr std::size_t kKeyDigits = 64;
constexpr std::size_t kDepthAt = kKeyDigits + 1 + kHex64Digits + 1;
constexpr std::uint64_t kMaxDepth = std::numeric_limits<std::int64_t>::max();

}  // namespace

std::uint64_t parent_prefix(const Key& parent) {
  std::uint64_t prefix = 0;
  for (std::size_t i = 0; i < sizeof prefix; ++i) prefix = prefix << 8 | parent.bytes[i];
  return prefix;
}

std::string file_name(const NameInfo& info) {
  if (info.depth < 1) {
    throw std::invalid_argument("[file_name] depth " + std::to_string(info.depth) + ", expected at least 1");
  }
  std::string name = info.key.hex();
  name += '-';
  append_hex64(name, info.parent_prefix);
  name += '-';
  name += std::to_string(info.depth);
  name += '.';
  name += part_name(info.part);
  name += kSuffix;
  return name;
}

std::string file_name(const Key& key, const Key& parent, std::int64_t depth, Part part) {
  return file_name({key, parent_prefix(parent), depth, part});
}

bool parse_file_name(std::string_view name, NameInfo& out) {
  NameInfo info;
  if (name.size() <= kDepthAt || !name.ends_with(kSuffix)) return false;
  if (name[kKeyDigits] != '-' || name[kDepthAt - 1] != '-') return false;
  if (!Key::from_hex(name.substr(0, kKeyDigits), info.key)) return false;
  if (!read_hex64(name.substr(kKeyDigits + 1, kHex64Digits), info.parent_prefix)) return false;

  name.remove_suffix(kSuffix.size());
  const auto tail = name.size() > kDepthAt ? name.substr(kDepthAt) : std::string_view{};
  const std::size_t dot = tail.find('.');
  std::uint64_t depth = 0;
  if (dot == std::string_view::npos || !read_decimal(tail.substr(0, dot), kMaxDepth, depth) || depth == 0) return false;
  if (!part_from_name(tail.substr(dot + 1), info.part)) return false;
  info.depth = static_cast<std::int64_t>(depth);
  out = info;
  return true;
}

}  // namespace prefixcache::layout
