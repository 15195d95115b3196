// Any bytes as a part file, or as a file's name: the answer is a Status or a header that writes the same bytes again.
//
// An input is the size of the data (four bytes, little-endian), then the file's first bytes. Each is tried twice: as it
// is, and with its checksum made to match, so that the fuzzer gets past the checksum to everything behind it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "layout/block_file.h"
#include "support/match_checksum.h"

namespace {

using namespace prefixcache;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

void try_header(const std::string& file, std::uint64_t data_bytes) {
  const std::uint64_t file_size = file.size() + data_bytes;
  layout::PartHeader header;
  std::uint64_t data_offset = 0;
  std::uint64_t needed = 0;
  const std::span bytes(reinterpret_cast<const std::uint8_t*>(file.data()), file.size());
  const Status status = layout::parse_header(bytes, file_size, header, data_offset, needed);
  if (status.is_ok()) {
    const std::string again = layout::encode_header(header);
    require(data_offset == again.size(), "the header ends where its data do not begin");
    require(file.starts_with(again), "the header has another spelling");
    for (const auto& tensor : header.tensors) {
      require(tensor.offset <= data_bytes && tensor.nbytes <= file_size - data_offset - tensor.offset,
              "a tensor ends outside the file");
      require(tensor.offset % tensor.dtype.size() == 0, "a tensor is not aligned");
    }
  } else if (status.code() == StatusCode::NotFound) {
    require(needed > file.size() && needed <= file_size, "more is needed than there is");
  } else {
    require(status.code() == StatusCode::Corrupt && !status.message().empty(), "no reason was given");
  }
}

void try_name(const std::string& name) {
  layout::NameInfo info;
  if (!layout::parse_file_name(name, info)) return;
  Key parent;
  for (int i = 0; i < 8; ++i) parent.bytes[i] = static_cast<std::uint8_t>(info.parent_prefix >> (56 - 8 * i));
  require(layout::file_name(info.key, parent, info.depth, info.part) == name, "the name has another spelling");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return 0;
  std::uint64_t data_bytes = 0;
  for (int i = 3; i >= 0; --i) data_bytes = data_bytes << 8 | data[i];
  std::string file(reinterpret_cast<const char*>(data) + 4, size - 4);
  try_name(file);
  try_header(file, data_bytes);
  testing::match_checksum(file);
  try_header(file, data_bytes);
  return 0;
}
