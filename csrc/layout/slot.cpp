#include "prefixcache/slot.h"

#include <array>

namespace prefixcache {
namespace {

constexpr std::array<std::string_view, kPartCount> kPartNames{"kv", "win", "state"};

}  // namespace

std::string_view part_name(Part part) {
  auto index = static_cast<std::size_t>(part);
  return index < kPartNames.size() ? kPartNames[index] : std::string_view{};
}

bool part_from_name(std::string_view name, Part& out) {
  for (std::size_t i = 0; i < kPartNames.size(); ++i) {
    if (kPartNames[i] == name) {
      out = static_cast<Part>(i);
      return true;
    }
  }
  return false;
}

}  // namespace prefixcache
