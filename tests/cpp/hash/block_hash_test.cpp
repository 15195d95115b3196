#include "prefixcache/block_hash.h"

#include <cstdint>
#include <fstream>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace prefixcache {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Tokens = std::vector<std::uint32_t>;

Key digest(const std::string& text) {
  return sha256({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

Tokens counted(std::size_t size) {
  Tokens tokens(size);
  std::iota(tokens.begin(), tokens.end(), 0u);
  return tokens;
}

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

Key key_of(const std::string& hex) {
  Key key;
  EXPECT_TRUE(Key::from_hex(hex, key)) << hex;
  return key;
}

std::vector<ContentKey> content_of(const nlohmann::json& items) {
  std::vector<ContentKey> content;
  for (const auto& item : items) content.push_back({item[0], item[1], key_of(item[2])});
  return content;
}

nlohmann::json golden() {
  std::ifstream file(PREFIXCACHE_GOLDEN_DIR "/block_hash_v1.json");
  return nlohmann::json::parse(file);
}

TEST(Key, HexGoesBothWays) {
  const Key key = digest("x");
  Key back;
  EXPECT_TRUE(Key::from_hex(key.hex(), back));
  EXPECT_EQ(back, key);
}

TEST(Key, FromHexRefusesOtherText) {
  const Key before = digest("before");
  const std::string good = digest("x").hex();
  for (const std::string& bad : {std::string(), good.substr(1), good + "0", "G" + good.substr(1), "A" + good.substr(1),
                                 " " + good.substr(1), good.substr(0, 63) + "\xff"}) {
    Key key = before;
    EXPECT_FALSE(Key::from_hex(bad, key)) << bad;
    EXPECT_EQ(key, before) << bad;
  }
}

TEST(BlockHash, GoldenChains) {
  const auto chains = golden()["chains"];
  ASSERT_GE(chains.size(), 10u);
  for (const auto& chain : chains) {
    SCOPED_TRACE(chain["name"].get<std::string>());
    std::vector<Salt> salts;
    for (const auto& salt : chain["salts"]) {
      salts.push_back({static_cast<Purpose>(salt[0].get<int>()), from_hex(salt[1])});
    }
    const Key id = namespace_id(chain["namespace"].get<std::string>());
    const Key root = chain_root(id, salts);
    EXPECT_EQ(root.hex(), chain["root"]);
    const Tokens tokens = chain["tokens"];
    const auto keys = chain_hashes(id, root, tokens, chain["block_size"], content_of(chain["content"]));
    ASSERT_EQ(keys.size(), chain["keys"].size());
    for (std::size_t i = 0; i < keys.size(); ++i) EXPECT_EQ(keys[i].hex(), chain["keys"][i]) << i;
  }
}

TEST(BlockHash, GoldenBlocks) {
  const auto blocks = golden()["blocks"];
  ASSERT_FALSE(blocks.empty());
  for (const auto& block : blocks) {
    const std::string parent = from_hex(block["parent"]);
    const Key key = block_key(namespace_id(block["namespace"].get<std::string>()),
                              {reinterpret_cast<const std::uint8_t*>(parent.data()), parent.size()},
                              block["tokens"].get<Tokens>(), content_of(block["content"]));
    EXPECT_EQ(key.hex(), block["key"]) << block["name"];
  }
}

TEST(BlockHash, AChainIsItsBlocksOneByOneAndCanBeContinued) {
  std::mt19937 random(1);
  const Key id = namespace_id("n");
  const Key root = chain_root(id, {});
  for (int round = 0; round < 200; ++round) {
    Tokens tokens(random() % 60);
    for (auto& token : tokens) token = static_cast<std::uint32_t>(random());
    const std::int64_t block = 1 + random() % 9;
    std::vector<ContentKey> content;
    for (unsigned i = random() % 4; i > 0; --i) {
      const std::int64_t start = random() % 64;
      const std::int64_t size = 1 + random() % 8;
      content.push_back({start, start + size, digest(std::to_string(random() % 3))});
    }
    const auto keys = chain_hashes(id, root, tokens, block, content);
    ASSERT_EQ(keys.size(), tokens.size() / block);
    Key parent = root;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::int64_t lo = i * block;
      const std::span<const std::uint32_t> own(tokens.data() + lo, block);
      EXPECT_EQ(keys[i], block_key(id, parent.bytes, own, content_of_block(content, lo, lo + block)));
      const auto rest = chain_hashes(id, parent, std::span(tokens).subspan(lo), block, content, i);
      EXPECT_EQ(rest, std::vector<Key>(keys.begin() + i, keys.end()));
      parent = keys[i];
    }
  }
}

TEST(BlockHash, EveryInputMatters) {
  const Key id = namespace_id("n");
  const Tokens tokens{1, 2, 3};
  const std::vector<std::uint8_t> parent{4, 5};
  std::unordered_set<Key> keys;
  const auto add = [&](const Key& key) { EXPECT_TRUE(keys.insert(key).second) << key.hex(); };
  add(block_key(id, parent, tokens));
  add(block_key(namespace_id("m"), parent, tokens));
  add(block_key(id, {}, tokens));
  add(block_key(id, std::vector<std::uint8_t>{4}, tokens));
  add(block_key(id, parent, Tokens{1, 2}));
  add(block_key(id, parent, Tokens{1, 2, 3, 0}));
  add(block_key(id, parent, Tokens{1, 3, 2}));
  add(block_key(id, parent, Tokens{}));
  // Bytes that move from the parent to the tokens are not the same block.
  add(block_key(id, std::vector<std::uint8_t>{4, 5, 3, 0, 0, 0}, Tokens{1, 2}));
  const Key image = digest("image");
  for (const ContentKey& content : {ContentKey{0, 1, image}, {1, 2, image}, {0, 2, image}, {0, 1, digest("other")}}) {
    add(block_key(id, parent, tokens, std::vector<ContentKey>{content}));
  }
  add(block_key(id, parent, tokens, std::vector<ContentKey>{{0, 1, image}, {1, 2, digest("b")}}));
  add(block_key(id, parent, tokens, std::vector<ContentKey>{{0, 1, digest("b")}, {1, 2, image}}));
}

TEST(BlockHash, TheOrderOfTheListOfContentKeysDoesNotMatter) {
  const Key id = namespace_id("n");
  const std::vector<ContentKey> one{{0, 1, digest("a")}, {2, 3, digest("b")}};
  const std::vector<ContentKey> other{{2, 3, digest("b")}, {0, 1, digest("a")}, {2, 3, digest("b")}};
  EXPECT_EQ(block_key(id, {}, counted(4), one), block_key(id, {}, counted(4), other));
  EXPECT_EQ(chain_hashes(id, id, counted(4), 2, one), chain_hashes(id, id, counted(4), 2, other));
}

TEST(BlockHash, SaltsDifferByPurposeOrderAndWhereTheyAreCut) {
  const Key id = namespace_id("n");
  const auto root = [&](std::vector<Salt> salts) { return chain_root(id, salts); };
  const std::vector<Key> roots{
      root({}),
      root({{Purpose::tenant, ""}}),
      root({{Purpose::tenant, "x"}}),
      root({{Purpose::kv_format, "x"}}),
      root({{Purpose::tenant, "x"}, {Purpose::kv_format, "y"}}),
      root({{Purpose::kv_format, "y"}, {Purpose::tenant, "x"}}),
      root({{Purpose::tenant, "ab"}, {Purpose::tenant, "c"}}),
      root({{Purpose::tenant, "a"}, {Purpose::tenant, "bc"}}),
      chain_root(namespace_id("m"), {}),
  };
  EXPECT_EQ(std::unordered_set<Key>(roots.begin(), roots.end()).size(), roots.size());
}

TEST(BlockHash, AContentKeyEntersTheFirstBlockItOverlapsAndAllLaterOnes) {
  const Key id = namespace_id("n");
  const Key root = chain_root(id, {});
  const Tokens tokens = counted(12);
  const auto plain = chain_hashes(id, root, tokens, 4);
  const auto salted = chain_hashes(id, root, tokens, 4, std::vector<ContentKey>{{7, 9, digest("image")}});
  EXPECT_EQ(salted[0], plain[0]);
  EXPECT_NE(salted[1], plain[1]);
  EXPECT_NE(salted[2], plain[2]);
}

TEST(BlockHash, ContentOfBlockTakesThoseThatBeginInIt) {
  const ContentKey a{3, 9, digest("a")};
  const ContentKey b{4, 5, digest("b")};
  const ContentKey c{7, 20, digest("c")};
  const std::vector<ContentKey> all{c, a, b};
  EXPECT_THAT(content_of_block(all, 0, 4), ElementsAre(a));
  EXPECT_THAT(content_of_block(all, 4, 8), ElementsAre(b, c));
  EXPECT_THAT(content_of_block(all, 8, 12), IsEmpty());
}

TEST(BlockHash, ManyContentKeysGiveManyKeys) {
  const Key id = namespace_id("n");
  const Key root = chain_root(id, {});
  const Tokens tokens = counted(4);
  std::unordered_set<Key> keys;
  for (int i = 0; i < 70000; ++i) {
    keys.insert(chain_hashes(id, root, tokens, 4, std::vector<ContentKey>{{0, 1, digest(std::to_string(i))}})[0]);
  }
  EXPECT_EQ(keys.size(), 70000u);
}

TEST(BlockHash, RefusesBadSizesAndRanges) {
  const Key id = namespace_id("n");
  const Tokens tokens = counted(8);
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  const auto with = [&](std::int64_t start, std::int64_t end) {
    return chain_hashes(id, id, tokens, 4, std::vector<ContentKey>{{start, end, Key{}}});
  };
  EXPECT_THROW(chain_hashes(id, id, tokens, 0), std::invalid_argument);
  EXPECT_THROW(chain_hashes(id, id, tokens, -4), std::invalid_argument);
  EXPECT_THROW(chain_hashes(id, id, tokens, 4, {}, -1), std::invalid_argument);
  EXPECT_THROW(chain_hashes(id, id, tokens, 4, {}, kLargest / 4), std::invalid_argument);
  EXPECT_THROW(with(-1, 3), std::invalid_argument);
  EXPECT_THROW(with(3, 3), std::invalid_argument);
  EXPECT_THROW(with(3, 2), std::invalid_argument);
  EXPECT_THROW(block_key(id, {}, tokens, std::vector<ContentKey>{{2, 1, Key{}}}), std::invalid_argument);
  EXPECT_THAT(chain_hashes(id, id, tokens, kLargest), IsEmpty());
}

}  // namespace
}  // namespace prefixcache
