#include "store/common_rows.h"

#include <algorithm>

namespace prefixcache::store {

std::int64_t common_rows(const BlockText& child, std::int64_t start, std::span<const std::uint32_t> tokens,
                         std::span<const ContentKey> content) {
  const std::size_t most = std::min(child.tokens.size(), tokens.size());
  const auto differs =
      std::mismatch(child.tokens.begin(), child.tokens.begin() + static_cast<std::ptrdiff_t>(most), tokens.begin());
  auto rows = static_cast<std::int64_t>(differs.first - child.tokens.begin());
  const auto end = start + static_cast<std::int64_t>(child.tokens.size());
  const std::vector<ContentKey> ours = content_of_block(content, start, end);
  const auto cut_at_missing = [&](std::span<const ContentKey> from, std::span<const ContentKey> in) {
    for (const auto& key : from) {
      if (std::find(in.begin(), in.end(), key) == in.end()) {
        rows = std::min(rows, std::max<std::int64_t>(0, key.start - start));
      }
    }
  };
  cut_at_missing(ours, child.content);
  cut_at_missing(child.content, ours);
  return rows;
}

bool begins_with(std::span<const std::uint32_t> tokens, std::span<const ContentKey> content,
                 std::span<const std::uint32_t> shorter, std::span<const ContentKey> shorter_content,
                 std::int64_t shorter_end) {
  if (tokens.size() < shorter.size() || !std::equal(shorter.begin(), shorter.end(), tokens.begin())) return false;
  const auto beyond =
      std::find_if(content.begin(), content.end(), [&](const ContentKey& key) { return key.start >= shorter_end; });
  return std::equal(shorter_content.begin(), shorter_content.end(), content.begin(), beyond);
}

}  // namespace prefixcache::store
