// One file of every kind, damaged everywhere: each byte flipped, each length tried. Never a wrong row, always a miss
// that is counted and forgotten.
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/store_fixture.h"

namespace prefixcache {
namespace {

namespace fs = std::filesystem;
using testing::Block;
using testing::chain;
using testing::SlotSpec;

constexpr std::uint64_t kGroup = 0x1234567890abcdefull;

struct FileKind {
  const char* name;
  Part part;
  std::int64_t tokens;
  std::vector<SlotSpec> specs;
};

std::vector<SlotSpec> many_dtypes() {
  return {{"0/keys", mlx::core::bfloat16, {1, 2, 0, 16}, 2},
          {"0/values", mlx::core::float16, {1, 2, 0, 16}, 2},
          {"1/keys", mlx::core::uint32, {1, 2, 0, 4}, 2},
          {"1/keys.scales", mlx::core::float32, {1, 2, 0, 2}, 2},
          {"1/codes", mlx::core::uint8, {0, 24}, 0},
          {"2/index", mlx::core::int64, {1, 0, 3}, 1},
          {"2/flags", mlx::core::bool_, {0}, 0},
          {"2/small", mlx::core::int16, {0, 2}, 0},
          {"3/signed", mlx::core::int8, {0, 3}, 0},
          {"3/words", mlx::core::uint16, {0, 3}, 0},
          {"3/numbers", mlx::core::int32, {0, 1}, 0},
          {"3/large", mlx::core::uint64, {0, 1}, 0},
          {"4/nothing", mlx::core::float32, {0, 0}, 0}};
}

std::vector<SlotSpec> states() {
  return {{"1/0", mlx::core::float32, {1, 3, 40}, kNoSeqAxis},
          {"1/1", mlx::core::bfloat16, {1, 129}, kNoSeqAxis},
          {"1/count", mlx::core::int64, {}, kNoSeqAxis}};
}

std::vector<FileKind> kinds() {
  return {{"Kv", Part::kv, 8, many_dtypes()},
          {"Quantised", Part::kv, 16, {{"0/k", mlx::core::uint32, {1, 2, 0, 8}, 2}}},
          {"Win", Part::win, 8, testing::two_slots()},
          {"State", Part::state, 8, states()},
          {"Tail", Part::kv, 3, many_dtypes()}};
}

class DamageSweep : public testing::StoreFixture, public ::testing::WithParamInterface<FileKind> {
 protected:
  void SetUp() override {
    options_.threads = 1;
    options_.ram_bytes = 0;
    block_ = chain(1, GetParam().tokens)[0];
    {
      const auto store = open();
      ASSERT_TRUE(put(*store).is_ok());
      ASSERT_TRUE(store->close().is_ok());
    }
    ASSERT_EQ(dir_.parts().size(), 1u);
    path_ = dir_.parts()[0];
    sound_ = testing::read_file(path_);
    std::uint64_t length = 0;
    for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<std::uint8_t>(sound_[static_cast<std::size_t>(i)]);
    header_bytes_ = length + 8;
    store_ = open();
    ASSERT_TRUE(serve()) << "the sound file";
  }

  Status put(BlockStore& store) const {
    const FileKind& kind = GetParam();
    if (kind.part == Part::win) return put_window(store, block_, block_.start(), block_.depth, kGroup, kind.specs);
    return put_block(store, block_, kind.specs, "a \"meta\" text", nullptr, kind.part);
  }
  std::uint64_t group() const { return GetParam().part == Part::win ? kGroup : 0; }

  // Looks for the file, reads it and checks what is served. True for a hit.
  bool serve() {
    const Key key = group_key(block_.key, group());
    const Key parent = group_key(block_.parent, group());
    if (store_->longest_prefix(std::vector<Key>{key}, parent, GetParam().tokens, GetParam().part) == 0) return false;
    auto request = testing::request_for({block_});
    request.part = GetParam().part;
    request.group = group();
    const Gathered gathered = store_->gather(request);
    if (!gathered.status.is_ok()) {
      EXPECT_TRUE(gathered.slots.empty());
      EXPECT_FALSE(gathered.status.message().empty());
      return false;
    }
    testing::expect_rows(gathered, {block_}, block_.start(), block_.depth, -1, GetParam().specs);
    return true;
  }

  void expect_miss(const std::string& damaged, const std::string& what) {
    ++tried_;
    testing::write_file(path_, damaged);
    ASSERT_FALSE(serve()) << what;
    ASSERT_FALSE(fs::exists(path_)) << what << ": the file stays in the way";
    const StoreStats stats = store_->stats();
    ASSERT_EQ(stats.corrupt_parts + stats.lost_parts, tried_) << what;
    ASSERT_EQ(stats.parts, 0u) << what;
  }

  Block block_;
  fs::path path_;
  std::string sound_;
  std::size_t header_bytes_ = 0;
  std::unique_ptr<BlockStore> store_;
  std::uint64_t tried_ = 0;
};

TEST_P(DamageSweep, EveryByte) {
  ASSERT_TRUE(store_->clear().is_ok());
  const auto flipped = [&](std::size_t byte, int bit) {
    std::string damaged = sound_;
    damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << bit));
    expect_miss(damaged, "bit " + std::to_string(bit) + " of byte " + std::to_string(byte) + " flipped");
  };
  for (std::size_t byte = 0; byte < header_bytes_ && !HasFatalFailure(); ++byte) {
    flipped(byte, static_cast<int>(byte % 8));
    flipped(byte, static_cast<int>((byte + 3) % 8));
  }
  for (std::size_t byte = header_bytes_; byte < sound_.size() && !HasFatalFailure(); ++byte) {
    flipped(byte, static_cast<int>(byte % 8));
  }
  for (std::size_t at = header_bytes_; at < sound_.size() && !HasFatalFailure(); at += 64) {
    const std::size_t end = std::min(at + 64, sound_.size());
    std::string zeroed = sound_;
    std::fill(zeroed.begin() + static_cast<std::ptrdiff_t>(at), zeroed.begin() + static_cast<std::ptrdiff_t>(end), 0);
    // Rows may be zeros by nature.
    if (zeroed != sound_) expect_miss(zeroed, "zeros from " + std::to_string(at));
  }
  testing::write_file(path_, sound_);
  EXPECT_TRUE(serve()) << "the sound file after all";
}

TEST_P(DamageSweep, EveryLength) {
  ASSERT_TRUE(store_->clear().is_ok());
  for (std::size_t size = 0; size < sound_.size() && !HasFatalFailure();) {
    expect_miss(sound_.substr(0, size), "cut to " + std::to_string(size) + " bytes");
    // Cut, then filled up again with zeros: what a file system may do after a power failure.
    std::string filled = sound_.substr(0, size);
    filled.resize(sound_.size(), '\0');
    if (filled != sound_) expect_miss(filled, "zeros behind " + std::to_string(size) + " bytes");
    size += size < 80 || sound_.size() - size < 80 ? 1 : 3;
  }
  for (const std::size_t more : {1, 63, 64, 4096, 1 << 20}) {
    expect_miss(sound_ + std::string(more, '\0'), std::to_string(more) + " bytes more");
  }
}

TEST_P(DamageSweep, PiecesOfTheFileInEachOthersPlace) {
  ASSERT_TRUE(store_->clear().is_ok());
  constexpr std::size_t kPiece = 64;
  for (std::size_t at = 0; at + 2 * kPiece <= sound_.size() && !HasFatalFailure(); at += kPiece) {
    std::string swapped = sound_;
    std::swap_ranges(swapped.begin() + static_cast<std::ptrdiff_t>(at),
                     swapped.begin() + static_cast<std::ptrdiff_t>(at + kPiece),
                     swapped.begin() + static_cast<std::ptrdiff_t>(at + kPiece));
    if (swapped != sound_) expect_miss(swapped, "pieces swapped at " + std::to_string(at));
  }
}

INSTANTIATE_TEST_SUITE_P(Files, DamageSweep, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace prefixcache
