// store_fixture.h: a store in a temporary directory on a file system that can fail.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "prefixcache/block_store.h"
#include "store/store_impl.h"
#include "support/blocks.h"
#include "support/faulty_env.h"
#include "support/temp_dir.h"

namespace prefixcache::testing {

// A part of 64 KiB and a header: the smallest unit that the RAM tier counts.
inline std::vector<SlotSpec> one_page() {
  return {{"keys", mlx::core::uint8, {0, 64 * 1024 / 4}, 0}};
}
inline constexpr std::uint64_t kPage = 64 * 1024;

class StoreFixture : public ::testing::Test {
 protected:
  StoreFixture() {
    options_.name_space = "test";
    options_.directory = dir_ / "store";
    options_.threads = 2;
    options_.env = &env_;
    // A machine's disk may stand still for seconds; what a stalled one does has tests of its own.
    options_.disk_wait_seconds = 60;
  }
  std::unique_ptr<BlockStore> open() { return std::make_unique<store::StoreImpl>(options_, arena_); }
  // Opens, stores, writes, closes.
  void prepare(const std::vector<Block>& blocks, const std::vector<SlotSpec>& specs = two_slots()) {
    const auto store = open();
    put_chain(*store, blocks, specs);
    ASSERT_TRUE(store->close().is_ok());
  }
  std::filesystem::path file_of(const Block& block) const {
    for (const auto& path : dir_.parts()) {
      if (path.filename().string().starts_with(block.key.hex())) return path;
    }
    return {};
  }
  // Whether it happens in a minute: a machine may have other things to do.
  static bool soon(const std::function<bool()>& happened) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!happened()) {
      if (std::chrono::steady_clock::now() > until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
  }
  static bool has(BlockStore& store, const Block& block) {
    return store.presence(std::vector<Key>{block.key})[0].has(Part::kv);
  }
  static std::size_t found(BlockStore& store, const std::vector<Block>& blocks) {
    return store.longest_prefix(keys_of(blocks), blocks[0].parent, blocks[0].depth - blocks[0].start(), Part::kv);
  }
  static std::size_t in_ram(BlockStore& store, const std::vector<Block>& blocks) {
    std::size_t count = 0;
    for (const auto& found : store.presence(keys_of(blocks))) count += found.parts[0].in_ram ? 1 : 0;
    return count;
  }
  std::string why_refused() {
    try {
      open();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  }

  TempDir dir_;
  FaultyEnv env_;
  Options options_;
  bool arena_ = false;
};

}  // namespace prefixcache::testing
