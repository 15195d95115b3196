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

class PartFile {
 public:
  // Opens `path`, reads its header and checks that it is the part its name says. Returns: NotFound, Corrupt, IOError.
  static Status open(Env& env, const std::string& path, const layout::NameInfo& expected,
                     std::shared_ptr<PartFile>& out);

  const layout::PartHeader& header() const { return header_; }
  std::uint64_t data_offset() const { return data_offset_; }
  // The whole file, or empty where it cannot be mapped.
  std::span<const std::uint8_t> mapping() const { return mapping_; }
  Status read(std::uint64_t offset, std::span<std::uint8_t> out) const { return file_->read(offset, out); }

  // Whether the digest of this tensor was compared since the file was opened.
  bool verified(std::size_t tensor) const { return verified_[tensor].load(std::memory_order_acquire); }
  void set_verified(std::size_t tensor) { verified_[tensor].store(true, std::memory_order_release); }
  // Before a tensor's bytes are read from the mapping: its pages come in with one call instead of a fault for each, and
  // those of the whole file are asked for if it is not in memory, since a disk is fastest when it has much to do. A
  // failure shows when the bytes are read. Costs something once for each tensor.
  void bring_in(std::size_t tensor);
  // True once for each tensor.
  bool first_touch(std::size_t tensor) { return !touched_[tensor].exchange(true, std::memory_order_relaxed); }

 private:
  std::unique_ptr<ReadableFile> file_;
  std::span<const std::uint8_t> mapping_;
  layout::PartHeader header_;
  std::uint64_t data_offset_ = 0;
  std::unique_ptr<std::atomic<bool>[]> verified_;
  std::unique_ptr<std::atomic<bool>[]> touched_;
  std::atomic<bool> asked_for_{false};
};

}  // namespace prefixcache::store
