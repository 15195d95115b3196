// check_header.h: what a v1 header may say, asked alike of headers to be written and of headers that were read.
//
// Threads: plain functions; any thread.
// Errors:  none throws; the answer is the reason, empty if all is well.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "layout/block_file.h"

namespace prefixcache::layout {

inline constexpr std::uint64_t kMaxHeaderBytes = std::uint64_t{64} << 20;
inline constexpr std::size_t kMaxMetaBytes = std::size_t{1} << 20;
inline constexpr std::size_t kMaxNameBytes = 256;
inline constexpr std::size_t kMaxTokens = std::size_t{1} << 20;
inline constexpr std::size_t kMaxTensors = std::size_t{1} << 16;
inline constexpr std::size_t kMaxRank = 16;
inline constexpr std::uint64_t kDataAlignment = 64;
inline constexpr std::string_view kMetadataName = "__metadata__";

// Why this header may not be written or trusted; empty if it may. Sets the bytes of all tensors together.
std::string why_invalid(const PartHeader& header, std::uint64_t& data_bytes);

// The bytes of a tensor of this dtype and shape. Empty, or why v1 cannot hold it.
std::string tensor_bytes(const TensorInfo& tensor, std::uint64_t& nbytes);

// Calls `each` for every tensor in the order of their data: by decreasing item size, among equals as they were put.
template <typename Tensors, typename Each>
void in_data_order(Tensors& tensors, Each each) {
  for (std::size_t size : {8, 4, 2, 1}) {
    for (auto& tensor : tensors) {
      if (tensor.dtype.size() == size) each(tensor);
    }
  }
}

}  // namespace prefixcache::layout
