// sample_headers.h: headers that the layout tests share, and tools to forge bad ones.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <string_view>

#include "hash/checksum.h"
#include "layout/block_file.h"

namespace prefixcache::layout::testing {

inline std::span<const std::uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

inline Key key_of(std::string_view text) {
  return sha256(bytes_of(text));
}

inline TensorInfo tensor(std::string name, mlx::core::Dtype dtype, mlx::core::Shape shape, int seq_axis = kNoSeqAxis) {
  TensorInfo info;
  info.name = std::move(name);
  info.dtype = dtype;
  info.shape = std::move(shape);
  info.seq_axis = seq_axis;
  info.digest = hash::xxh3_64(bytes_of(info.name));
  return info;
}

// A block of three tokens with a little of everything. Tensors are placed.
inline PartHeader small_header() {
  PartHeader header;
  header.key = key_of("key");
  header.parent = key_of("parent");
  header.depth = 7;
  header.part = Part::win;
  header.row_lo = 5;
  header.row_hi = 7;
  header.tokens = {0, 4294967295u, 17};
  header.content = {{5, 900, key_of("image")}};
  header.meta = "a\"b\\c\n\x01 \xc3\xa9";
  header.tensors = {
      tensor("0/codes", mlx::core::uint8, {2, 3}, 0),
      tensor("0/\"k\"", mlx::core::bfloat16, {1, 2, 4}, 1),
      tensor("count", mlx::core::int64, {}),
      tensor("", mlx::core::float32, {0, 5}),
  };
  place_tensors(header.tensors);
  return header;
}

inline std::uint64_t data_bytes(const PartHeader& header) {
  std::uint64_t sum = 0;
  for (const auto& info : header.tensors) sum += info.nbytes;
  return sum;
}

struct Parsed {
  Status status;
  PartHeader header;
  std::uint64_t data_offset = 0;
  std::uint64_t needed = 0;
};

inline Parsed parse(std::string_view prefix, std::uint64_t file_size) {
  Parsed parsed;
  parsed.status = parse_header(bytes_of(prefix), file_size, parsed.header, parsed.data_offset, parsed.needed);
  return parsed;
}

// The file's first bytes for this JSON text: padded, measured, and with a checksum that matches, so that only the
// meaning of the text can be refused.
inline std::string seal(std::string json) {
  constexpr std::string_view kBefore = "\"checksum\":\"";
  constexpr std::string_view kZeros = "0000000000000000";
  while ((json.size() + 8) % 64 != 0) json += ' ';
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(json.size() >> (8 * i));
  file += json;
  const auto at = file.find(kBefore) + kBefore.size();
  file.replace(at, kZeros.size(), kZeros);
  const std::uint64_t digest = hash::xxh3_64(bytes_of(file));
  for (int i = 0; i < 16; ++i) file[at + i] = "0123456789abcdef"[digest >> (60 - 4 * i) & 15];
  return file;
}

inline std::string json_of(std::string_view file) {
  return std::string(file.substr(8, file.find_last_not_of(' ') - 7));
}

// The file's first bytes for `header` after one edit of its JSON text, with a checksum that matches.
inline std::string forge(const PartHeader& header, std::string_view from, std::string_view to) {
  std::string json = json_of(encode_header(header));
  const auto at = json.find(from);
  if (at == std::string::npos) throw std::logic_error("nothing to forge: " + std::string(from));
  return seal(json.replace(at, from.size(), to));
}

inline std::string random_text(std::mt19937& random, std::size_t longest) {
  static const std::vector<std::string> kPieces = {"a",
                                                   "/",
                                                   "7",
                                                   "\"",
                                                   "\\",
                                                   "\n",
                                                   std::string(1, '\0'),
                                                   "\x1f",
                                                   ":",
                                                   ",",
                                                   "\xc3\xa9",
                                                   "\xe2\x82\xac",
                                                   "\xf0\x9f\x98\x80",
                                                   "\x7f"};
  std::string text;
  for (std::size_t want = random() % (longest + 1); text.size() < want;) text += kPieces[random() % kPieces.size()];
  return text;
}

inline PartHeader random_header(std::mt19937& random) {
  static const std::vector<mlx::core::Dtype> kDtypes = {
      mlx::core::bool_,   mlx::core::uint8,   mlx::core::uint16,  mlx::core::uint32, mlx::core::uint64,
      mlx::core::int8,    mlx::core::int16,   mlx::core::int32,   mlx::core::int64,  mlx::core::float16,
      mlx::core::float32, mlx::core::float64, mlx::core::bfloat16};
  PartHeader header;
  for (auto* key : {&header.key, &header.parent}) {
    for (auto& byte : key->bytes) byte = static_cast<std::uint8_t>(random());
  }
  header.part = static_cast<Part>(random() % kPartCount);
  header.tokens.resize(1 + random() % 300);
  for (auto& token : header.tokens) token = static_cast<std::uint32_t>(random()) >> (random() % 32);
  const auto tokens = static_cast<std::int64_t>(header.tokens.size());
  header.depth = tokens + static_cast<std::int64_t>(random() % 100000);
  header.row_hi = header.depth - static_cast<std::int64_t>(random() % tokens);
  header.row_lo = header.row_hi - static_cast<std::int64_t>(random() % tokens % (header.row_hi + 1));
  for (std::size_t i = random() % 4; i > 0; --i) {
    const auto start = header.depth - tokens + static_cast<std::int64_t>(random() % tokens);
    header.content.push_back({start, start + 1 + static_cast<std::int64_t>(random()), key_of(std::to_string(i))});
  }
  header.meta = random_text(random, 200);
  for (std::size_t i = random() % 20; i > 0; --i) {
    auto info = tensor(std::to_string(i) + random_text(random, 20), kDtypes[random() % kDtypes.size()], {});
    for (std::size_t rank = random() % 6; rank > 0; --rank) info.shape.push_back(static_cast<int>(random() % 5));
    if (!info.shape.empty() && random() % 2 == 0) {
      info.seq_axis = static_cast<int>(random() % info.shape.size());
      info.shape[info.seq_axis] = static_cast<int>(header.row_hi - header.row_lo);
    }
    header.tensors.push_back(std::move(info));
  }
  place_tensors(header.tensors);
  return header;
}

}  // namespace prefixcache::layout::testing
