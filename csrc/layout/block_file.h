// block_file.h: the v1 part file, a valid safetensors file (docs/block_format.md).
//
// Threads: plain functions and values; any thread.
// Errors:  parse_header answers Corrupt with the reason for anything it does not fully accept. Bytes are hostile: every
//          number is bounded before use, and memory follows the header's bytes that are there, never a number in them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <mlx/array.h>
#include <mlx/dtype.h>

#include "prefixcache/block_hash.h"
#include "prefixcache/slot.h"
#include "prefixcache/status.h"

namespace prefixcache::layout {

// One tensor of a part. `shape` is the stored shape: along seq_axis it has the rows of this part.
struct TensorInfo {
  std::string name;
  mlx::core::Dtype dtype = mlx::core::float32;
  mlx::core::Shape shape;
  int seq_axis = kNoSeqAxis;
  std::uint64_t offset = 0;  // from the start of the data
  std::uint64_t nbytes = 0;
  std::uint64_t digest = 0;  // XXH3-64 of the tensor's bytes

  bool operator==(const TensorInfo&) const = default;
};

struct PartHeader {
  Key key;
  Key parent;
  std::int64_t depth = 0;
  Part part = Part::kv;
  std::int64_t row_lo = 0;
  std::int64_t row_hi = 0;
  std::vector<std::uint32_t> tokens;
  std::vector<ContentKey> content;
  std::string meta;
  std::vector<TensorInfo> tensors;  // in the order they were put; `offset` says where each lies

  bool operator==(const PartHeader&) const = default;
};

// Sets every tensor's nbytes and offset: larger items first, so that each is aligned without holes. Returns data bytes.
// Throws std::invalid_argument for a dtype or shape that v1 cannot hold.
std::uint64_t place_tensors(std::vector<TensorInfo>& tensors);

// The file's first bytes: length, JSON header with checksum, padding. The result's size is a multiple of 64 and depends
// on digests not at all. Equal headers give equal bytes. Tensors must have been placed. Throws std::invalid_argument,
// with the reason, for a header that parse_header would refuse.
std::string encode_header(const PartHeader& header);

// Reads the header from the start of a file of `file_size` bytes. `prefix` holds at least the whole header, or the call
// answers NotFound with `needed` set to the bytes it wants (never above file_size; before the length is known that is a
// guess, so a second NotFound may follow). Checks the header's own checksum, then that it is spelled as encode_header
// spells it, that tensors fill the file without overlap or hole, and every field's range. It does not read tensors:
// their digests are for the caller to compare. Returns: Ok; NotFound; Corrupt. Sets `out` and `data_offset` only on Ok.
Status parse_header(std::span<const std::uint8_t> prefix, std::uint64_t file_size, PartHeader& out,
                    std::uint64_t& data_offset, std::uint64_t& needed);

// File names: <64 hex key>-<16 hex parent>-<depth>.<part>.safetensors. Throws std::invalid_argument for a depth below
// 1.

struct NameInfo {
  Key key;
  std::uint64_t parent_prefix = 0;  // the parent's first 8 bytes, big-endian
  std::int64_t depth = 0;
  Part part = Part::kv;
};
// False, and `out` untouched, for every name that file_name does not give.
std::string file_name(const NameInfo& name);
std::string file_name(const Key& key, const Key& parent, std::int64_t depth, Part part);
bool parse_file_name(std::string_view name, NameInfo& out);
std::uint64_t parent_prefix(const Key& parent);

// What may be stored: the dtype's safetensors name, or empty if it is not one that v1 knows.
std::string_view dtype_name(mlx::core::Dtype dtype);
bool dtype_from_name(std::string_view name, mlx::core::Dtype& out);

}  // namespace prefixcache::layout
