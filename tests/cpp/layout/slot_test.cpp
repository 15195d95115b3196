#include "prefixcache/slot.h"

#include <gtest/gtest.h>

namespace prefixcache {
namespace {

TEST(PartName, NamesAndNumbersAreFixedForEver) {
  EXPECT_EQ(part_name(static_cast<Part>(0)), "kv");
  EXPECT_EQ(part_name(static_cast<Part>(1)), "win");
  EXPECT_EQ(part_name(static_cast<Part>(2)), "state");
}

TEST(PartName, ComesBack) {
  for (int i = 0; i < kPartCount; ++i) {
    const auto part = static_cast<Part>(i);
    Part found = static_cast<Part>((i + 1) % kPartCount);
    ASSERT_TRUE(part_from_name(part_name(part), found));
    EXPECT_EQ(found, part);
  }
}

TEST(PartName, OthersAreRefused) {
  EXPECT_EQ(part_name(static_cast<Part>(kPartCount)), "");
  Part untouched = Part::win;
  for (const char* name : {"", "KV", "kv ", "k", "states", "0"}) EXPECT_FALSE(part_from_name(name, untouched)) << name;
  EXPECT_EQ(untouched, Part::win);
}

}  // namespace
}  // namespace prefixcache
