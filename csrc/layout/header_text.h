// header_text.h: the fixed pieces of a v1 header. They reach the disk: do not change.
//
// Threads: constants.
#pragma once

#include <string_view>

namespace prefixcache::layout::text {

// The length of the JSON text, little-endian, before it.
inline constexpr std::size_t kLengthBytes = 8;

inline constexpr std::string_view kOpen = R"({"__metadata__":{"format":"prefixcache.v1","checksum":")";
inline constexpr std::size_t kChecksumAt = kLengthBytes + kOpen.size();
inline constexpr std::string_view kKey = R"(","key":")";
inline constexpr std::string_view kParent = R"(","parent":")";
inline constexpr std::string_view kDepth = R"(","depth":")";
inline constexpr std::string_view kPart = R"(","part":")";
inline constexpr std::string_view kRows = R"(","rows":")";
inline constexpr std::string_view kTokens = R"(","tokens":")";
inline constexpr std::string_view kContent = R"(","content":")";
// The two texts that may hold any character bring their own quotes.
inline constexpr std::string_view kMeta = R"(","meta":)";
inline constexpr std::string_view kTensors = R"(,"tensors":)";
inline constexpr std::string_view kMetadataEnd = "}";

// One tensor, behind its name.
inline constexpr std::string_view kDtype = R"(:{"dtype":")";
inline constexpr std::string_view kShape = R"(","shape":[)";
inline constexpr std::string_view kOffsets = R"(],"data_offsets":[)";
inline constexpr std::string_view kTensorEnd = "]}";

// How a tensor without a sequence axis is written in "tensors".
inline constexpr std::string_view kNoAxis = "-1";

}  // namespace prefixcache::layout::text
