#include <stdexcept>

#include "hash/checksum.h"
#include "layout/block_file.h"
#include "layout/check_header.h"
#include "layout/header_text.h"
#include "layout/text.h"

namespace prefixcache::layout {
namespace {

void append_number(std::string& out, std::uint64_t value) {
  out += std::to_string(value);
}

void append_tokens(std::string& out, const std::vector<std::uint32_t>& tokens) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) out += ',';
    append_number(out, tokens[i]);
  }
}

void append_content(std::string& out, const std::vector<ContentKey>& content) {
  for (std::size_t i = 0; i < content.size(); ++i) {
    if (i > 0) out += ',';
    append_number(out, static_cast<std::uint64_t>(content[i].start));
    out += ':';
    append_number(out, static_cast<std::uint64_t>(content[i].end));
    out += ':';
    out += content[i].digest.hex();
  }
}

// The text of the "tensors" entry, before JSON's quoting.
std::string tensor_list(const std::vector<TensorInfo>& tensors) {
  std::string out;
  for (const auto& tensor : tensors) {
    if (!out.empty()) out += ',';
    out += tensor.seq_axis == kNoSeqAxis ? std::string(text::kNoAxis) : std::to_string(tensor.seq_axis);
    out += ':';
    append_hex64(out, tensor.digest);
    out += ':';
    append_number(out, tensor.name.size());
    out += ':';
    out += tensor.name;
  }
  return out;
}

void append_tensor(std::string& out, const TensorInfo& tensor) {
  out += ',';
  append_json_string(out, tensor.name);
  out += text::kDtype;
  out += dtype_name(tensor.dtype);
  out += text::kShape;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    if (i > 0) out += ',';
    append_number(out, static_cast<std::uint64_t>(tensor.shape[i]));
  }
  out += text::kOffsets;
  append_number(out, tensor.offset);
  out += ',';
  append_number(out, tensor.offset + tensor.nbytes);
  out += text::kTensorEnd;
}

void append_metadata(std::string& out, const PartHeader& header) {
  out += text::kOpen;
  out.append(kHex64Digits, '0');
  out += text::kKey;
  out += header.key.hex();
  out += text::kParent;
  out += header.parent.hex();
  out += text::kDepth;
  append_number(out, static_cast<std::uint64_t>(header.depth));
  out += text::kPart;
  out += part_name(header.part);
  out += text::kRows;
  append_number(out, static_cast<std::uint64_t>(header.row_lo));
  out += ':';
  append_number(out, static_cast<std::uint64_t>(header.row_hi));
  out += text::kTokens;
  append_tokens(out, header.tokens);
  out += text::kContent;
  append_content(out, header.content);
  out += text::kMeta;
  append_json_string(out, header.meta);
  out += text::kTensors;
  append_json_string(out, tensor_list(header.tensors));
  out += text::kMetadataEnd;
}

}  // namespace

std::uint64_t place_tensors(std::vector<TensorInfo>& tensors) {
  for (auto& tensor : tensors) {
    if (auto reason = tensor_bytes(tensor, tensor.nbytes); !reason.empty()) {
      throw std::invalid_argument("[place_tensors] tensor " + shown(tensor.name) + ": " + reason);
    }
  }
  std::uint64_t position = 0;
  in_data_order(tensors, [&](TensorInfo& tensor) {
    tensor.offset = position;
    if (__builtin_add_overflow(position, tensor.nbytes, &position)) {
      throw std::invalid_argument("[place_tensors] tensor " + shown(tensor.name) + ": data that end above 2^64");
    }
  });
  return position;
}

std::string encode_header(const PartHeader& header) {
  std::uint64_t data_bytes = 0;
  if (auto reason = why_invalid(header, data_bytes); !reason.empty()) {
    throw std::invalid_argument("[encode_header] " + reason);
  }
  std::string out(text::kLengthBytes, '\0');
  out.reserve(1024 + 8 * header.tokens.size() + header.meta.size() + 192 * header.tensors.size());
  append_metadata(out, header);
  for (const auto& tensor : header.tensors) append_tensor(out, tensor);
  out += '}';
  out.resize((out.size() + kDataAlignment - 1) / kDataAlignment * kDataAlignment, ' ');
  if (out.size() > kMaxHeaderBytes) {
    throw std::invalid_argument("[encode_header] a header of " + std::to_string(out.size()) +
                                " bytes, expected at most " + std::to_string(kMaxHeaderBytes));
  }
  const std::uint64_t length = out.size() - text::kLengthBytes;
  for (std::size_t i = 0; i < text::kLengthBytes; ++i) out[i] = static_cast<char>(length >> (8 * i));
  std::string digits;
  append_hex64(digits, hash::xxh3_64({reinterpret_cast<const std::uint8_t*>(out.data()), out.size()}));
  out.replace(text::kChecksumAt, kHex64Digits, digits);
  return out;
}

}  // namespace prefixcache::layout
