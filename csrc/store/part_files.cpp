#include "prefixcache/part_files.h"

#include <algorithm>
#include <memory>

#include "hash/checksum.h"
#include "layout/block_file.h"
#include "store/directory.h"
#include "store/part_file.h"

namespace prefixcache {

namespace {

// What check_part holds of a file's data at a time.
constexpr std::uint64_t kPiece = 1 << 20;

Status check_tensor(const store::PartFile& file, const layout::TensorInfo& tensor, const std::string& path) {
  std::vector<std::uint8_t> piece(std::min(kPiece, tensor.nbytes));
  hash::Xxh3Stream stream;
  for (std::uint64_t done = 0; done < tensor.nbytes;) {
    const std::span<std::uint8_t> part(piece.data(), std::min<std::uint64_t>(piece.size(), tensor.nbytes - done));
    if (Status status = file.read(file.data_offset() + tensor.offset + done, part); !status.is_ok()) return status;
    stream.update(part);
    done += part.size();
  }
  if (stream.digest() == tensor.digest) return Status::ok();
  return {StatusCode::Corrupt,
          "the bytes of tensor '" + tensor.name + "' are not those that were stored (" + path + ")"};
}

}  // namespace

bool parse_part_name(std::string_view file_name, PartName& out) {
  layout::NameInfo name;
  if (!layout::parse_file_name(file_name, name)) return false;
  out = {name.key, name.parent_prefix, name.depth, name.part};
  return true;
}

Status check_part(Env& env, const std::string& path, bool data, PartSummary& out) {
  layout::NameInfo name;
  if (!layout::parse_file_name(std::string_view(path).substr(path.rfind('/') + 1), name)) {
    return {StatusCode::Corrupt, "not the name of a part file (" + path + ")"};
  }
  std::unique_ptr<ReadableFile> opened;
  if (Status status = env.open(path, opened); !status.is_ok()) return status;
  std::shared_ptr<store::PartFile> file;
  if (Status status = store::PartFile::open(std::move(opened), path, name, file); !status.is_ok()) return status;
  const layout::PartHeader& header = file->header();
  PartSummary summary{header.row_lo, header.row_hi, header.tokens.size(), header.tensors.size(), 0};
  for (const auto& tensor : header.tensors) summary.tensor_bytes += tensor.nbytes;
  out = summary;
  const store::PartFile::InOrder in_order(*file);
  for (const auto& tensor : header.tensors) {
    if (!data) break;
    if (Status status = check_tensor(*file, tensor, path); !status.is_ok()) return status;
  }
  return Status::ok();
}

std::vector<std::size_t> eviction_order(std::span<PartAge> parts) {
  std::vector<store::FoundPart> found(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const PartName& name = parts[i].name;
    found[i].name = {name.key, name.parent_prefix, name.depth, name.part};
    found[i].modified = parts[i].modified;
    found[i].bytes = i;  // its place: the order does not depend on sizes
  }
  store::sort_by_recency(found);
  std::vector<std::size_t> order;
  order.reserve(found.size());
  for (const auto& part : found) {
    parts[part.bytes].modified = part.modified;
    order.push_back(part.bytes);
  }
  return order;
}

}  // namespace prefixcache
