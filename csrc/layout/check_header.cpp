#include "layout/check_header.h"

#include <algorithm>
#include <limits>

#include "layout/text.h"

namespace prefixcache::layout {
namespace {

constexpr std::uint64_t kLargest = std::numeric_limits<std::int64_t>::max();

std::string range(std::int64_t lo, std::int64_t hi) {
  std::string out("[");
  out += std::to_string(lo);
  out += ", ";
  out += std::to_string(hi);
  out += ')';
  return out;
}

std::string why_invalid_positions(const PartHeader& header) {
  if (part_name(header.part).empty()) {
    return "part number " + std::to_string(static_cast<int>(header.part)) + " is not one of v1";
  }
  if (header.tokens.empty() || header.tokens.size() > kMaxTokens) {
    return std::to_string(header.tokens.size()) + " tokens, expected 1 to " + std::to_string(kMaxTokens);
  }
  const auto tokens = static_cast<std::int64_t>(header.tokens.size());
  if (header.depth < tokens) {
    return "depth " + std::to_string(header.depth) + " is below the " + std::to_string(tokens) + " tokens of the block";
  }
  if (header.row_lo < 0 || header.row_lo > header.row_hi || header.row_hi > header.depth) {
    return "rows " + range(header.row_lo, header.row_hi) + " do not lie in " + range(0, header.depth);
  }
  for (const auto& content : header.content) {
    if (content.start < header.depth - tokens || content.start >= header.depth || content.end <= content.start) {
      return "content range " + range(content.start, content.end) + " does not begin in the block " +
             range(header.depth - tokens, header.depth) + " or is empty";
    }
  }
  if (header.meta.size() > kMaxMetaBytes) {
    return "meta of " + std::to_string(header.meta.size()) + " bytes, expected at most " +
           std::to_string(kMaxMetaBytes);
  }
  if (!is_utf8(header.meta)) return "meta is not UTF-8";
  return {};
}

std::string why_invalid_names(const std::vector<TensorInfo>& tensors) {
  if (tensors.size() > kMaxTensors) {
    return std::to_string(tensors.size()) + " tensors, expected at most " + std::to_string(kMaxTensors);
  }
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    const std::string_view name = tensor.name;
    if (name.size() > kMaxNameBytes || name == kMetadataName || !is_utf8(name)) {
      return "tensor name " + shown(name) + " is not UTF-8 text of at most " + std::to_string(kMaxNameBytes) +
             " bytes other than " + shown(kMetadataName);
    }
    names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  return twice == names.end() ? std::string{} : "tensor name " + shown(*twice) + " occurs twice";
}

std::string why_invalid_axis(const PartHeader& header, const TensorInfo& tensor) {
  if (tensor.seq_axis == kNoSeqAxis) return {};
  const auto rank = static_cast<int>(tensor.shape.size());
  if (tensor.seq_axis < 0 || tensor.seq_axis >= rank) {
    return "sequence axis " + std::to_string(tensor.seq_axis) + " of a tensor with " + std::to_string(rank) + " axes";
  }
  const std::int64_t rows = tensor.shape[tensor.seq_axis];
  if (rows == header.row_hi - header.row_lo) return {};
  return std::to_string(rows) + " rows along axis " + std::to_string(tensor.seq_axis) + ", expected those of " +
         range(header.row_lo, header.row_hi);
}

}  // namespace

std::string tensor_bytes(const TensorInfo& tensor, std::uint64_t& nbytes) {
  if (dtype_name(tensor.dtype).empty()) return "a dtype that v1 does not know";
  if (tensor.shape.size() > kMaxRank) {
    return std::to_string(tensor.shape.size()) + " axes, expected at most " + std::to_string(kMaxRank);
  }
  // Axes of length 0 are left out of the bound, so that strides too stay in range.
  std::uint64_t bound = tensor.dtype.size();
  bool empty = false;
  for (auto length : tensor.shape) {
    if (length < 0) return "an axis of length " + std::to_string(length);
    const auto factor = static_cast<std::uint64_t>(std::max<std::int64_t>(length, 1));
    empty = empty || length == 0;
    if (bound > kLargest / factor) return "more than 2^63 bytes";
    bound *= factor;
  }
  nbytes = empty ? 0 : bound;
  return {};
}

std::string why_invalid(const PartHeader& header, std::uint64_t& data_bytes) {
  if (auto reason = why_invalid_positions(header); !reason.empty()) return reason;
  if (auto reason = why_invalid_names(header.tensors); !reason.empty()) return reason;
  for (const auto& tensor : header.tensors) {
    std::uint64_t nbytes = 0;
    auto reason = tensor_bytes(tensor, nbytes);
    if (reason.empty()) reason = why_invalid_axis(header, tensor);
    if (reason.empty() && tensor.nbytes != nbytes) {
      reason = std::to_string(tensor.nbytes) + " bytes, expected " + std::to_string(nbytes) + " for its shape";
    }
    if (!reason.empty()) return "tensor " + shown(tensor.name) + ": " + reason;
  }
  std::string reason;
  std::uint64_t position = 0;
  in_data_order(header.tensors, [&](const TensorInfo& tensor) {
    if (!reason.empty()) return;
    if (tensor.offset != position) {
      reason = "tensor " + shown(tensor.name) + ": data at " + std::to_string(tensor.offset) + ", expected at " +
               std::to_string(position);
    } else if (tensor.nbytes > kLargest - position) {
      reason = "tensor " + shown(tensor.name) + ": data that end above 2^63";
    }
    position += tensor.nbytes;
  });
  data_bytes = position;
  return reason;
}

}  // namespace prefixcache::layout
