#include "store/part_file.h"

#include <algorithm>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

namespace prefixcache::store {

namespace {

// Holds the header of a block of a few hundred tokens and slots; longer ones cost a second read.
constexpr std::uint64_t kFirstRead = 24 << 10;

Status read_header(ReadableFile& file, layout::PartHeader& header, std::uint64_t& data_offset) {
  const std::uint64_t size = file.info().size;
  std::vector<std::uint8_t> bytes(std::min(size, kFirstRead));
  for (;;) {
    if (Status status = file.read(0, bytes); !status.is_ok()) return status;
    std::uint64_t needed = 0;
    Status status = layout::parse_header(bytes, size, header, data_offset, needed);
    if (status.code() != StatusCode::NotFound) return status;
    if (needed <= bytes.size() || needed > size) return {StatusCode::Corrupt, "header is longer than its file"};
    bytes.resize(needed);
  }
}

#ifdef __APPLE__
using Residence = char;
#else
using Residence = unsigned char;
#endif

// Whole pages.
struct Pages {
  explicit Pages(std::span<const std::uint8_t> bytes)
      : begin(reinterpret_cast<std::uintptr_t>(bytes.data()) / size() * size()),
        end(reinterpret_cast<std::uintptr_t>(bytes.data()) + bytes.size()) {}

  static std::uintptr_t size() {
    static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    return page;
  }
  void advise(int advice) const { ::madvise(reinterpret_cast<void*>(begin), end - begin, advice); }

  std::uintptr_t begin, end;
};

void read_ahead(std::span<const std::uint8_t> file) {
  // One page tells: what was read or written lately is there as a whole. The header's was just read.
  const Pages middle(file.subspan(file.size() / 2, 1));
  Residence resident = 0;
  if (::mincore(reinterpret_cast<void*>(middle.begin), 1, &resident) != 0 || (resident & 1) != 0) return;
  Pages(file).advise(MADV_WILLNEED);
}

}  // namespace

void PartFile::bring_in(std::size_t tensor) {
  if (mapping_.empty() || !first_touch(tensor)) return;
  if (!asked_for_.exchange(true, std::memory_order_relaxed)) read_ahead(mapping_);
#ifdef MADV_POPULATE_READ
  const auto& info = header_.tensors[tensor];
  Pages(mapping_.subspan(data_offset_ + info.offset, info.nbytes)).advise(MADV_POPULATE_READ);
#endif
}

Status PartFile::open(Env& env, const std::string& path, const layout::NameInfo& expected,
                      std::shared_ptr<PartFile>& out) {
  auto part = std::make_shared<PartFile>();
  if (Status status = env.open(path, part->file_); !status.is_ok()) return status;
  if (Status status = read_header(*part->file_, part->header_, part->data_offset_); !status.is_ok()) {
    return {status.code(), status.message() + " (" + path + ")", status.error_number()};
  }
  const auto& header = part->header_;
  if (header.key != expected.key || header.depth != expected.depth || header.part != expected.part ||
      layout::parent_prefix(header.parent) != expected.parent_prefix) {
    return {StatusCode::Corrupt, "the file's name and its header disagree (" + path + ")"};
  }
  part->mapping_ = part->file_->map();
  part->verified_ = std::make_unique<std::atomic<bool>[]>(header.tensors.size());
  part->touched_ = std::make_unique<std::atomic<bool>[]>(header.tensors.size());
  out = std::move(part);
  return Status::ok();
}

}  // namespace prefixcache::store
