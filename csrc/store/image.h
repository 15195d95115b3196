// image.h: a part in RAM, as it lies in its file.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "layout/block_file.h"
#include "store/buffer_pool.h"

namespace prefixcache::store {

// Immutable once it is in the index, but for the tensors' digests, which the writer fills before it encodes the header
// and which nobody reads from an image.
struct Image {
  layout::PartHeader header;
  Key block;  // the key before group_key()
  // What its tensors are, and so where they lie: equal pointers say that two images are alike in all of that.
  std::shared_ptr<const std::string> form;
  std::shared_ptr<Buffer> buffer;
  std::uint64_t data_bytes = 0;

  // What it takes of a pool: nothing where it has no tensors, and then it has no buffer.
  std::uint64_t memory() const { return data_bytes == 0 ? 0 : BufferPool::rounded(data_bytes); }
  std::uint64_t held() const { return buffer == nullptr ? 0 : buffer->size(); }
  std::span<const std::uint8_t> data() const {
    return {data_bytes == 0 ? nullptr : buffer->data(), static_cast<std::size_t>(data_bytes)};
  }
};

}  // namespace prefixcache::store
