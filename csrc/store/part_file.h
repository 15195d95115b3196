// part_file.h: one part file, open for reading, its header checked.
//
// Threads: any, after open.
// Owns:    the mapping: it outlives the file's name.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "layout/block_file.h"
#include "prefixcache/env.h"

namespace prefixcache::store {

// Holds the header of a block of a few hundred tokens and slots; longer ones cost a second read.
inline constexpr std::uint64_t kHeaderRead = 24 << 10;

class PartFile {
 public:
  // Reads the header of a file that was opened as `path`, and checks that it is the part its name says. Returns:
  // Corrupt, IOError.
  static Status open(std::unique_ptr<ReadableFile> file, const std::string& path, const layout::NameInfo& expected,
                     std::shared_ptr<PartFile>& out);

  const layout::PartHeader& header() const { return header_; }
  std::uint64_t data_offset() const { return data_offset_; }
  // The whole file, or empty where it cannot be mapped.
  std::span<const std::uint8_t> mapping() const { return mapping_; }
  Status read(std::uint64_t offset, std::span<std::uint8_t> out) const { return file_->read(offset, out); }

  // Whether the digest of this tensor was compared since the file was opened.
  bool verified(std::size_t tensor) const { return verified_[tensor].load(std::memory_order_acquire); }
  void set_verified(std::size_t tensor) { verified_[tensor].store(true, std::memory_order_release); }
  // Whether the tensors need no disk, as far as one page of them tells: what was read or written lately is there whole.
  bool in_memory() const;

  // While one of these lives the system reads far ahead in the file, which is gone through from low to high offsets.
  class InOrder {
   public:
    explicit InOrder(PartFile& file);
    ~InOrder();
    InOrder(const InOrder&) = delete;
    InOrder& operator=(const InOrder&) = delete;

   private:
    PartFile& file_;
  };

  // Before a tensor's bytes are read from the mapping: its pages come in with one call instead of a fault for each. A
  // failure shows when the bytes are read. Costs something once for each tensor.
  void bring_in(std::size_t tensor);
  // True once for each tensor.
  bool first_touch(std::size_t tensor) { return !touched_[tensor].exchange(true, std::memory_order_relaxed); }

 private:
  void advise(int advice) const;

  std::unique_ptr<ReadableFile> file_;
  std::span<const std::uint8_t> mapping_;
  layout::PartHeader header_;
  std::uint64_t data_offset_ = 0;
  std::unique_ptr<std::atomic<bool>[]> verified_;
  std::unique_ptr<std::atomic<bool>[]> touched_;
  std::atomic<int> in_order_{0};
};

}  // namespace prefixcache::store
