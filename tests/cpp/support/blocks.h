// blocks.h: blocks whose every byte tells which block, slot and position it belongs to.
//
// Threads: plain functions. They never evaluate a lazy array, so any thread may use them.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <mlx/array.h>

#include "arrays/mlx_compat.h"
#include "prefixcache/block_store.h"

namespace prefixcache::testing {

// A slot of every block of a chain. `shape` has the rows' extent left out: any number stands at seq_axis.
struct SlotSpec {
  std::string name;
  mlx::core::Dtype dtype = mlx::core::float16;
  mlx::core::Shape shape;
  int seq_axis = kNoSeqAxis;
};

struct Block {
  Key key;
  Key parent;
  std::int64_t depth = 0;
  std::vector<std::uint32_t> tokens;
  std::vector<ContentKey> content;

  std::int64_t start() const { return depth - static_cast<std::int64_t>(tokens.size()); }
};

inline const Key& test_namespace() {
  static const Key id = namespace_id("test");
  return id;
}

inline const Key& test_root() {
  static const Key root = chain_root(test_namespace(), {});
  return root;
}

inline std::vector<SlotSpec> two_slots() {
  return {{"0/keys", mlx::core::float16, {1, 2, 0, 8}, 2}, {"0/codes", mlx::core::uint8, {1, 3, 0, 5}, 2}};
}

inline std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The block of `tokens` under `parent`, from position `start` on.
inline Block block_under(const Key& parent, std::int64_t start, std::vector<std::uint32_t> tokens,
                         std::vector<ContentKey> content = {}) {
  Block block;
  block.parent = parent;
  block.depth = start + static_cast<std::int64_t>(tokens.size());
  block.key = block_key(test_namespace(), parent.bytes, tokens, content);
  block.tokens = std::move(tokens);
  block.content = std::move(content);
  return block;
}

inline Block block_under(const Block& parent, std::vector<std::uint32_t> tokens) {
  return block_under(parent.key, parent.depth, std::move(tokens));
}

// `count` blocks of `size` tokens, the first under `parent` at `start`. Another `salt` gives other tokens.
inline std::vector<Block> chain(std::size_t count, std::int64_t size, std::uint32_t salt = 0,
                                const Key& parent = test_root(), std::int64_t start = 0) {
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<std::uint32_t> tokens(static_cast<std::size_t>(size));
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      tokens[t] = static_cast<std::uint32_t>(mixed(salt * 1000003ull + i * 1009 + t) & 0xffff);
    }
    const Key before = i == 0 ? parent : blocks.back().key;
    blocks.push_back(block_under(before, start + static_cast<std::int64_t>(i) * size, std::move(tokens)));
  }
  return blocks;
}

inline std::vector<Key> keys_of(const std::vector<Block>& blocks) {
  std::vector<Key> keys;
  for (const auto& block : blocks) keys.push_back(block.key);
  return keys;
}

// The bytes of one row of one outer index; of the whole array where there is no sequence axis.
inline std::vector<std::uint8_t> row_bytes(const SlotSpec& spec, const Key& key, std::size_t outer,
                                           std::int64_t position) {
  std::size_t size = mlx::core::size_of(spec.dtype);
  for (std::size_t d = static_cast<std::size_t>(spec.seq_axis + 1); d < spec.shape.size(); ++d) {
    size *= static_cast<std::size_t>(spec.shape[d]);
  }
  std::uint64_t seed;
  std::memcpy(&seed, key.bytes.data(), sizeof seed);
  seed ^= mixed(std::hash<std::string>{}(spec.name)) + mixed(outer * 7919 + static_cast<std::uint64_t>(position));
  std::vector<std::uint8_t> bytes(size);
  for (std::size_t i = 0; i < size; ++i) {
    if (i % 8 == 0) seed = mixed(seed);
    bytes[i] = static_cast<std::uint8_t>(seed >> (8 * (i % 8)));
    if (spec.dtype == mlx::core::bool_) bytes[i] &= 1;
  }
  return bytes;
}

inline std::size_t outer_of(const SlotSpec& spec) {
  std::size_t outer = 1;
  for (int d = 0; d < spec.seq_axis; ++d) outer *= static_cast<std::size_t>(spec.shape[static_cast<std::size_t>(d)]);
  return outer;
}

// Rows [lo, hi) of a block's slot, with `spare` zero rows behind them, as bytes in row-major order.
inline std::vector<std::uint8_t> expected_bytes(const SlotSpec& spec, const std::vector<Block>& blocks, std::int64_t lo,
                                                std::int64_t hi, std::int64_t spare = 0) {
  if (spec.seq_axis == kNoSeqAxis) return row_bytes(spec, blocks.back().key, 0, 0);
  std::vector<std::uint8_t> bytes;
  for (std::size_t outer = 0; outer < outer_of(spec); ++outer) {
    for (const auto& block : blocks) {
      for (std::int64_t p = std::max(lo, block.start()); p < std::min(hi, block.depth); ++p) {
        const auto row = row_bytes(spec, block.key, outer, p);
        bytes.insert(bytes.end(), row.begin(), row.end());
      }
    }
    bytes.insert(bytes.end(), row_bytes(spec, {}, outer, 0).size() * static_cast<std::size_t>(spare), 0);
  }
  return bytes;
}

inline mlx::core::array array_of(const SlotSpec& spec, const std::vector<Block>& blocks, std::int64_t lo,
                                 std::int64_t hi) {
  auto shape = spec.shape;
  if (spec.seq_axis != kNoSeqAxis) shape[static_cast<std::size_t>(spec.seq_axis)] = static_cast<int>(hi - lo);
  auto array = make_uninitialised(shape, spec.dtype);
  const auto bytes = expected_bytes(spec, blocks, lo, hi);
  if (!bytes.empty()) std::memcpy(array.data<std::uint8_t>(), bytes.data(), bytes.size());
  return array;
}

// Stores all rows of a block.
inline Status put_block(BlockStore& store, const Block& block, const std::vector<SlotSpec>& specs = two_slots(),
                        std::string_view meta = "", std::uint64_t* added = nullptr, Part part = Part::kv) {
  std::vector<SlotInput> slots;
  for (const auto& spec : specs) {
    slots.push_back({spec.name, array_of(spec, {block}, block.start(), block.depth), spec.seq_axis, block.start()});
  }
  PutRequest request;
  request.key = block.key;
  request.parent = block.parent;
  request.depth = block.depth;
  request.part = part;
  request.row_lo = block.start();
  request.row_hi = block.depth;
  request.tokens = block.tokens;
  request.content = block.content;
  request.slots = slots;
  request.meta = meta;
  return store.put(request, added);
}

// Stores rows [lo, hi) of a block as those of a window.
inline Status put_window(BlockStore& store, const Block& block, std::int64_t lo, std::int64_t hi, std::uint64_t group,
                         const std::vector<SlotSpec>& specs = two_slots(), std::uint64_t* added = nullptr) {
  std::vector<SlotInput> slots;
  for (const auto& spec : specs) {
    slots.push_back({spec.name, array_of(spec, {block}, lo, hi), spec.seq_axis, lo});
  }
  PutRequest request;
  request.key = block.key;
  request.parent = block.parent;
  request.depth = block.depth;
  request.part = Part::win;
  request.row_lo = lo;
  request.row_hi = hi;
  request.tokens = block.tokens;
  request.slots = slots;
  request.group = group;
  return store.put(request, added);
}

// Stores a small array as the state at the end of a block.
inline std::vector<SlotSpec> one_state() {
  return {{"1/0", mlx::core::float32, {3}, kNoSeqAxis}};
}
inline Status put_state(BlockStore& store, const Block& block) {
  return put_block(store, block, one_state(), "", nullptr, Part::state);
}

// The first `count` tokens of a block.
inline Block tail_of(const Block& block, std::int64_t count) {
  return block_under(block.parent, block.start(), {block.tokens.begin(), block.tokens.begin() + count});
}

inline void put_chain(BlockStore& store, const std::vector<Block>& blocks,
                      const std::vector<SlotSpec>& specs = two_slots()) {
  for (const auto& block : blocks) {
    const Status status = put_block(store, block, specs);
    ASSERT_TRUE(status.is_ok()) << status.message();
  }
}

inline GatherRequest request_for(const std::vector<Block>& blocks, std::int64_t lo, std::int64_t hi,
                                 std::int64_t capacity = -1) {
  GatherRequest request;
  request.keys = keys_of(blocks);
  request.row_lo = lo;
  request.row_hi = hi;
  request.capacity = capacity < 0 ? hi - lo : capacity;
  return request;
}

inline GatherRequest request_for(const std::vector<Block>& blocks) {
  return request_for(blocks, blocks.front().start(), blocks.back().depth);
}

inline std::vector<std::uint8_t> contiguous_bytes(const mlx::core::array& array) {
  if (array.nbytes() == 0) return {};
  const auto* data = array.data<std::uint8_t>();
  return {data, data + array.nbytes()};
}

// Fails the test unless `gathered` holds exactly these rows, zeros behind them, and is their only owner.
inline void expect_rows(const Gathered& gathered, const std::vector<Block>& blocks, std::int64_t lo, std::int64_t hi,
                        std::int64_t capacity = -1, const std::vector<SlotSpec>& specs = two_slots()) {
  ASSERT_TRUE(gathered.status.is_ok()) << gathered.status.message();
  EXPECT_EQ(gathered.good, blocks.size());
  ASSERT_EQ(gathered.slots.size(), specs.size());
  const std::int64_t rows = capacity < 0 ? hi - lo : capacity;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto& slot = gathered.slots[i];
    EXPECT_EQ(slot.name, specs[i].name);
    EXPECT_EQ(slot.seq_axis, specs[i].seq_axis);
    EXPECT_EQ(slot.array.dtype().val(), specs[i].dtype.val());
    auto shape = specs[i].shape;
    if (slot.seq_axis != kNoSeqAxis) shape[static_cast<std::size_t>(slot.seq_axis)] = static_cast<int>(rows);
    ASSERT_EQ(slot.array.shape(), shape);
    EXPECT_TRUE(slot.array.flags().row_contiguous);
    EXPECT_TRUE(slot.array.is_donatable()) << "somebody else holds the buffer";
    const auto wanted = expected_bytes(specs[i], blocks, lo, hi, rows - (hi - lo));
    EXPECT_TRUE(contiguous_bytes(slot.array) == wanted) << "bytes of slot " << slot.name << " differ";
  }
}

inline void expect_chain(BlockStore& store, const std::vector<Block>& blocks,
                         const std::vector<SlotSpec>& specs = two_slots()) {
  const auto gathered = store.gather(request_for(blocks));
  expect_rows(gathered, blocks, blocks.front().start(), blocks.back().depth, -1, specs);
}

}  // namespace prefixcache::testing
