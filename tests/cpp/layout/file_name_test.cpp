#include <gtest/gtest.h>

#include <limits>

#include "layout/sample_headers.h"

namespace prefixcache::layout::testing {
namespace {

TEST(FileName, IsFixedForEver) {
  Key key;
  Key parent;
  for (int i = 0; i < 32; ++i) {
    key.bytes[i] = static_cast<std::uint8_t>(i);
    parent.bytes[i] = static_cast<std::uint8_t>(255 - i);
  }
  EXPECT_EQ(file_name(key, parent, 512, Part::kv),
            "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f-fffefdfcfbfaf9f8-512.kv.safetensors");
  EXPECT_EQ(parent_prefix(parent), 0xfffefdfcfbfaf9f8u);
}

TEST(FileName, ComesBack) {
  std::mt19937 random(11);
  for (int round = 0; round < 2000; ++round) {
    const Key key = key_of(std::to_string(random()));
    const Key parent = key_of(std::to_string(random()));
    const std::uint64_t wide = std::uint64_t{random()} << 31 ^ random();
    const auto depth = 1 + static_cast<std::int64_t>(wide >> (random() % 63));
    const auto part = static_cast<Part>(random() % kPartCount);
    NameInfo info;
    ASSERT_TRUE(parse_file_name(file_name(key, parent, depth, part), info));
    ASSERT_EQ(info.key, key);
    ASSERT_EQ(info.parent_prefix, parent_prefix(parent));
    ASSERT_EQ(info.depth, depth);
    ASSERT_EQ(info.part, part);
  }
}

TEST(FileName, TakesTheLargestDepthAndNoneBelowOne) {
  const Key key = key_of("key");
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  NameInfo info;
  ASSERT_TRUE(parse_file_name(file_name(key, key, kMost, Part::state), info));
  EXPECT_EQ(info.depth, kMost);
  EXPECT_THROW(file_name(key, key, 0, Part::kv), std::invalid_argument);
  EXPECT_THROW(file_name(key, key, -1, Part::kv), std::invalid_argument);
}

TEST(FileName, RefusesEveryOtherSpelling) {
  const std::string key = key_of("key").hex();
  const std::string parent = key_of("parent").hex().substr(0, 16);
  auto name = [&](std::string depth, std::string rest) { return key + "-" + parent + "-" + depth + rest; };
  NameInfo info;
  ASSERT_TRUE(parse_file_name(name("256", ".win.safetensors"), info));
  const NameInfo before = info;

  const std::string good = name("256", ".win.safetensors");
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(parse_file_name(good.substr(0, size), info)) << size;
    EXPECT_FALSE(parse_file_name(good.substr(size + 1), info)) << size;
  }
  // No one changed byte gives the same name, or one that file_name would spell otherwise.
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string other = good;
      other[i] = static_cast<char>(byte);
      NameInfo found;
      if (!parse_file_name(other, found)) continue;
      Key found_parent;
      for (int b = 0; b < 8; ++b) {
        found_parent.bytes[b] = static_cast<std::uint8_t>(found.parent_prefix >> (56 - 8 * b));
      }
      EXPECT_EQ(file_name(found.key, found_parent, found.depth, found.part), other);
    }
  }
  for (const char* depth : {"", "0", "00", "0256", "-1", "+1", " 1", "1 ", "1e3", "0x10", "9223372036854775808",
                            "99999999999999999999999", "2.56"}) {
    EXPECT_FALSE(parse_file_name(name(depth, ".win.safetensors"), info)) << depth;
  }
  for (const char* rest : {"", ".", ".win", ".win.", "..win.safetensors", ".win.safetensors.tmp", ".Win.safetensors",
                           ".win.safetensor", ".win.SAFETENSORS", ".wins.safetensors", "..safetensors", ".safetensors",
                           "/.win.safetensors", ".win.safetensors\n", ".win..safetensors"}) {
    EXPECT_FALSE(parse_file_name(name("256", rest), info)) << rest;
  }
  std::string upper = good;
  for (auto& c : upper) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  EXPECT_FALSE(parse_file_name(upper, info));
  EXPECT_FALSE(parse_file_name("../" + good, info));
  EXPECT_FALSE(parse_file_name(good + std::string(1, '\0'), info));
  EXPECT_EQ(info.key, before.key);
  EXPECT_EQ(info.depth, before.depth);
}

}  // namespace
}  // namespace prefixcache::layout::testing
