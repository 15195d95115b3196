// array_digest.cpp: XXH3-128 of each 8 MiB, by several threads, then SHA-256 over those in order.
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "arrays/shared_array.h"
#include "hash/checksum.h"
#include "hash/encode.h"
#include "hash/row_major.h"
#include "hash/sha256.h"
#include "prefixcache/digest.h"

namespace prefixcache {

namespace {

namespace mx = mlx::core;

constexpr std::string_view kTag = "prefixcache.a.v1";
constexpr std::size_t kChunkBytes = std::size_t{8} << 20;
constexpr int kMostThreads = 8;

using ChunkDigest = std::array<std::uint8_t, 16>;

// MLX may renumber its dtypes; names stay.
std::string_view dtype_name(mx::Dtype dtype) {
  switch (dtype.val()) {
    case mx::Dtype::Val::bool_:
      return "bool";
    case mx::Dtype::Val::uint8:
      return "uint8";
    case mx::Dtype::Val::uint16:
      return "uint16";
    case mx::Dtype::Val::uint32:
      return "uint32";
    case mx::Dtype::Val::uint64:
      return "uint64";
    case mx::Dtype::Val::int8:
      return "int8";
    case mx::Dtype::Val::int16:
      return "int16";
    case mx::Dtype::Val::int32:
      return "int32";
    case mx::Dtype::Val::int64:
      return "int64";
    case mx::Dtype::Val::float16:
      return "float16";
    case mx::Dtype::Val::float32:
      return "float32";
    case mx::Dtype::Val::float64:
      return "float64";
    case mx::Dtype::Val::bfloat16:
      return "bfloat16";
    case mx::Dtype::Val::complex64:
      return "complex64";
  }
  throw std::invalid_argument("dtype number " + std::to_string(static_cast<int>(dtype.val())) + " is not known");
}

int thread_count(int asked, std::size_t chunks) {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int wanted = asked > 0 ? asked : std::min(cores, kMostThreads);
  return static_cast<int>(std::min(static_cast<std::size_t>(wanted), chunks));
}

// Digests chunks until none is left. A buffer is given where the array is not row-contiguous.
class ChunkHasher {
 public:
  ChunkHasher(const hash::StridedView& view, std::size_t bytes, std::vector<ChunkDigest>& digests)
      : view_(view), bytes_(bytes), digests_(digests) {}

  void work(std::uint8_t* buffer) {
    for (std::size_t i = next_++; i < digests_.size(); i = next_++) {
      const std::size_t lo = i * kChunkBytes;
      const std::size_t size = std::min(kChunkBytes, bytes_ - lo);
      const std::uint8_t* data = view_.data + lo;
      if (buffer != nullptr) {
        hash::copy_row_major(view_, lo / view_.item_size, size / view_.item_size, buffer);
        data = buffer;
      }
      digests_[i] = hash::xxh3_128({data, size});
    }
  }

 private:
  const hash::StridedView& view_;
  const std::size_t bytes_;
  std::vector<ChunkDigest>& digests_;
  std::atomic<std::size_t> next_{0};
};

std::vector<ChunkDigest> chunk_digests(const hash::StridedView& view, std::size_t bytes, bool contiguous, int asked) {
  std::vector<ChunkDigest> digests((bytes + kChunkBytes - 1) / kChunkBytes);
  const int threads = thread_count(asked, digests.size());
  const std::size_t buffer_bytes = contiguous ? 0 : std::min(kChunkBytes, bytes);
  std::vector<std::vector<std::uint8_t>> buffers(threads, std::vector<std::uint8_t>(buffer_bytes));
  const auto buffer = [&](int i) { return contiguous ? nullptr : buffers[i].data(); };

  ChunkHasher hasher(view, bytes, digests);
  std::vector<std::thread> helpers;
  helpers.reserve(threads);
  try {
    for (int i = 1; i < threads; ++i) helpers.emplace_back([&hasher, data = buffer(i)] { hasher.work(data); });
  } catch (const std::system_error&) {
    // No more threads to be had: those that started, and this one, do it all.
  }
  if (threads > 0) hasher.work(buffer(0));
  for (std::thread& helper : helpers) helper.join();
  return digests;
}

}  // namespace

Key array_digest(const mx::array& array, int threads) {
  mx::array evaluated = array;
  if (!is_evaluated(evaluated)) evaluated.eval();
  hash::StridedView view;
  view.data = bytes_of(evaluated);
  view.item_size = evaluated.itemsize();
  view.shape.assign(evaluated.shape().begin(), evaluated.shape().end());
  view.strides.assign(evaluated.strides().begin(), evaluated.strides().end());

  const std::string_view dtype = dtype_name(evaluated.dtype());
  hash::Sha256 sha;
  sha.update(hash::as_bytes(kTag));
  hash::add_le(sha, static_cast<std::uint32_t>(dtype.size()));
  sha.update(hash::as_bytes(dtype));
  hash::add_le(sha, static_cast<std::uint32_t>(view.shape.size()));
  for (const std::int64_t extent : view.shape) hash::add_le(sha, extent);
  for (const ChunkDigest& digest : chunk_digests(view, evaluated.nbytes(), evaluated.flags().row_contiguous, threads)) {
    sha.update(digest);
  }
  return sha.finish();
}

}  // namespace prefixcache
