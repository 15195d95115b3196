#include "store/part_file.h"

#include <algorithm>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

namespace prefixcache::store {

namespace {

Status read_header(ReadableFile& file, layout::PartHeader& header, std::uint64_t& data_offset) {
  const std::uint64_t size = file.info().size;
  std::vector<std::uint8_t> bytes(std::min(size, kHeaderRead));
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

}  // namespace

bool PartFile::in_memory() const {
  if (mapping_.empty()) return true;
  const Pages middle(mapping_.subspan(data_offset_ + (mapping_.size() - data_offset_) / 2, 1));
  // Read with the header.
  const auto begin = reinterpret_cast<std::uintptr_t>(mapping_.data());
  if (middle.begin < begin + std::max(kHeaderRead, data_offset_)) return true;
  Residence resident = 1;
  return ::mincore(reinterpret_cast<void*>(middle.begin), 1, &resident) != 0 || (resident & 1) != 0;
}

void PartFile::advise(int advice) const {
  const Pages pages(mapping_);
  // What begins within a page is no mapping of its own.
  if (!mapping_.empty() && pages.begin == reinterpret_cast<std::uintptr_t>(mapping_.data())) pages.advise(advice);
}

PartFile::InOrder::InOrder(PartFile& file) : file_(file) {
  if (file_.in_order_.fetch_add(1) == 0) file_.advise(MADV_SEQUENTIAL);
}

PartFile::InOrder::~InOrder() {
  // What is gone through in order is thrown away first; what was read is to stay.
  if (file_.in_order_.fetch_sub(1) == 1) file_.advise(MADV_NORMAL);
}

void PartFile::bring_in(std::size_t tensor) {
  if (!first_touch(tensor)) return;
#ifdef MADV_POPULATE_READ
  const auto& info = header_.tensors[tensor];
  Pages(mapping_.subspan(data_offset_ + info.offset, info.nbytes)).advise(MADV_POPULATE_READ);
#endif
}

Status PartFile::open(std::unique_ptr<ReadableFile> file, const std::string& path, const layout::NameInfo& expected,
                      std::shared_ptr<PartFile>& out) {
  auto part = std::make_shared<PartFile>();
  part->file_ = std::move(file);
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
