#include <algorithm>
#include <array>
#include <limits>

#include "hash/checksum.h"
#include "layout/block_file.h"
#include "layout/check_header.h"
#include "layout/header_text.h"
#include "layout/text.h"

namespace prefixcache::layout {
namespace {

constexpr std::uint64_t kMaxPosition = std::numeric_limits<std::int64_t>::max();
constexpr std::uint64_t kMaxAxisLength = std::numeric_limits<mlx::core::ShapeElem>::max();

// What is asked for when not even the length is known: enough for most headers.
constexpr std::uint64_t kFirstRead = 16 << 10;

std::uint64_t header_length(std::span<const std::uint8_t> prefix) {
  std::uint64_t length = 0;
  for (std::size_t i = text::kLengthBytes; i-- > 0;) length = length << 8 | prefix[i];
  return length;
}

// The digest of the header with '0' in place of its checksum's digits.
std::uint64_t header_checksum(std::span<const std::uint8_t> header) {
  static constexpr std::array<std::uint8_t, kHex64Digits> kZeros = [] {
    std::array<std::uint8_t, kHex64Digits> zeros{};
    zeros.fill('0');
    return zeros;
  }();
  hash::Xxh3Stream stream;
  stream.update(header.first(text::kChecksumAt));
  stream.update(kZeros);
  stream.update(header.subspan(text::kChecksumAt + kHex64Digits));
  return stream.digest();
}

Key read_key(Cursor& cursor) {
  Key key;
  const auto digits = cursor.take(2 * key.bytes.size());
  if (!Key::from_hex(digits, key)) cursor.fail("expected 64 lower-case hexadecimal digits, found " + shown(digits));
  return key;
}

std::int64_t read_position(Cursor& cursor) {
  return static_cast<std::int64_t>(cursor.decimal(kMaxPosition));
}

std::vector<std::uint32_t> read_tokens(std::string_view listed) {
  Cursor cursor(listed, "tokens");
  // Counted first, so that memory follows the text that is there.
  const auto count = static_cast<std::size_t>(std::count(listed.begin(), listed.end(), ',')) + 1;
  if (count > kMaxTokens) cursor.fail("more than " + std::to_string(kMaxTokens) + " tokens");
  std::vector<std::uint32_t> tokens;
  tokens.reserve(count);
  while (true) {
    tokens.push_back(static_cast<std::uint32_t>(cursor.decimal(std::numeric_limits<std::uint32_t>::max())));
    if (cursor.at_end()) return tokens;
    cursor.expect(",");
  }
}

std::vector<ContentKey> read_content(std::string_view listed) {
  Cursor cursor(listed, "content");
  std::vector<ContentKey> content;
  while (!cursor.at_end()) {
    if (!content.empty()) cursor.expect(",");
    ContentKey& key = content.emplace_back();
    key.start = read_position(cursor);
    cursor.expect(":");
    key.end = read_position(cursor);
    cursor.expect(":");
    key.digest = read_key(cursor);
  }
  return content;
}

std::vector<TensorInfo> read_tensor_list(std::string_view listed) {
  // An item has 21 bytes at least, with the comma 22.
  constexpr std::size_t kLeastItem = 22;
  Cursor cursor(listed, "tensors");
  std::vector<TensorInfo> tensors;
  tensors.reserve(std::min((listed.size() + 1) / kLeastItem, kMaxTensors));
  while (!cursor.at_end()) {
    if (tensors.size() == kMaxTensors) cursor.fail("more than " + std::to_string(kMaxTensors) + " tensors");
    if (!tensors.empty()) cursor.expect(",");
    TensorInfo& tensor = tensors.emplace_back();
    if (cursor.next_is(text::kNoAxis[0])) {
      cursor.expect(text::kNoAxis);
    } else {
      tensor.seq_axis = static_cast<int>(cursor.decimal(kMaxRank - 1));
    }
    cursor.expect(":");
    tensor.digest = cursor.hex64();
    cursor.expect(":");
    const auto length = cursor.decimal(kMaxNameBytes);
    cursor.expect(":");
    tensor.name = cursor.take(length);
  }
  return tensors;
}

mlx::core::Shape read_shape(Cursor& cursor) {
  mlx::core::Shape shape;
  while (!cursor.next_is(']')) {
    if (shape.size() == kMaxRank) cursor.fail("more than " + std::to_string(kMaxRank) + " axes");
    if (!shape.empty()) cursor.expect(",");
    shape.push_back(static_cast<mlx::core::ShapeElem>(cursor.decimal(kMaxAxisLength)));
  }
  return shape;
}

void read_tensor(Cursor& cursor, TensorInfo& tensor) {
  cursor.expect(",");
  std::string storage;
  const auto name = cursor.json_string(storage);
  if (name != tensor.name) cursor.fail("expected tensor " + shown(tensor.name) + ", found " + shown(name));
  cursor.expect(text::kDtype);
  const auto dtype = cursor.until('"');
  if (!dtype_from_name(dtype, tensor.dtype)) cursor.fail("dtype " + shown(dtype) + " is not one of v1");
  cursor.expect(text::kShape.substr(1));
  tensor.shape = read_shape(cursor);
  cursor.expect(text::kOffsets);
  tensor.offset = cursor.decimal(kMaxPosition);
  cursor.expect(",");
  const auto end = cursor.decimal(kMaxPosition);
  if (end < tensor.offset) cursor.fail("data of " + shown(tensor.name) + " end before they begin");
  tensor.nbytes = end - tensor.offset;
  cursor.expect(text::kTensorEnd);
}

PartHeader read_header(std::string_view json) {
  Cursor cursor(json, "header");
  PartHeader header;
  cursor.expect(text::kOpen);
  cursor.hex64();
  cursor.expect(text::kKey);
  header.key = read_key(cursor);
  cursor.expect(text::kParent);
  header.parent = read_key(cursor);
  cursor.expect(text::kDepth);
  header.depth = read_position(cursor);
  cursor.expect(text::kPart);
  const auto part = cursor.until('"');
  if (!part_from_name(part, header.part)) cursor.fail("part " + shown(part) + " is not one of v1");
  cursor.expect(text::kRows.substr(1));
  header.row_lo = read_position(cursor);
  cursor.expect(":");
  header.row_hi = read_position(cursor);
  cursor.expect(text::kTokens);
  header.tokens = read_tokens(cursor.until('"'));
  cursor.expect(text::kContent.substr(1));
  header.content = read_content(cursor.until('"'));
  cursor.expect(text::kMeta.substr(1));
  std::string storage;
  header.meta = cursor.json_string(storage);
  cursor.expect(text::kTensors);
  header.tensors = read_tensor_list(cursor.json_string(storage));
  cursor.expect(text::kMetadataEnd);
  for (auto& tensor : header.tensors) read_tensor(cursor, tensor);
  cursor.expect("}");
  // Padding is as short as alignment allows.
  if (cursor.rest().size() >= kDataAlignment) cursor.fail("more padding than alignment needs");
  while (!cursor.at_end()) cursor.expect(" ");
  return header;
}

Status corrupt(std::string reason) {
  return Status(StatusCode::Corrupt, std::move(reason));
}

// Everything behind the length, of a header that is wholly there.
Status parse_whole(std::span<const std::uint8_t> bytes, std::uint64_t data_in_file, PartHeader& out) {
  const std::string_view json(reinterpret_cast<const char*>(bytes.data()) + text::kLengthBytes,
                              bytes.size() - text::kLengthBytes);
  Cursor start(json, "header");
  start.expect(text::kOpen);
  if (start.hex64() != header_checksum(bytes)) return corrupt("the header's checksum does not match");

  PartHeader header = read_header(json);
  std::uint64_t data_bytes = 0;
  if (auto reason = why_invalid(header, data_bytes); !reason.empty()) return corrupt(std::move(reason));
  if (data_bytes != data_in_file) {
    return corrupt("tensors of " + std::to_string(data_bytes) + " bytes in a file with " +
                   std::to_string(data_in_file) + " bytes of data");
  }
  out = std::move(header);
  return Status::ok();
}

}  // namespace

Status parse_header(std::span<const std::uint8_t> prefix, std::uint64_t file_size, PartHeader& out,
                    std::uint64_t& data_offset, std::uint64_t& needed) {
  if (file_size < text::kLengthBytes) return corrupt("a file of " + std::to_string(file_size) + " bytes has no header");
  if (prefix.size() < text::kLengthBytes) {
    needed = std::min(file_size, kFirstRead);
    return Status(StatusCode::NotFound, "the header's length is not in the prefix");
  }
  const std::uint64_t length = header_length(prefix);
  const std::uint64_t most = std::min(file_size, kMaxHeaderBytes) - text::kLengthBytes;
  if (length > most || (length + text::kLengthBytes) % kDataAlignment != 0) {
    return corrupt("a header of " + std::to_string(length) + " bytes in a file of " + std::to_string(file_size) +
                   " bytes, expected at most " + std::to_string(most) + " and 8 less than a multiple of " +
                   std::to_string(kDataAlignment));
  }
  const std::uint64_t header_bytes = length + text::kLengthBytes;
  if (prefix.size() < header_bytes) {
    needed = header_bytes;
    return Status(StatusCode::NotFound, "the header is longer than the prefix");
  }
  try {
    const Status status = parse_whole(prefix.first(header_bytes), file_size - header_bytes, out);
    if (status.is_ok()) data_offset = header_bytes;
    return status;
  } catch (const Malformed& malformed) {
    return corrupt(malformed.reason);
  }
}

}  // namespace prefixcache::layout
