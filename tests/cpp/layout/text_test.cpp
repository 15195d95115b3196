#include "layout/text.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace prefixcache::layout {
namespace {

constexpr std::uint64_t kAny = ~std::uint64_t{0};

TEST(Text, DecimalHasOneSpelling) {
  std::uint64_t value = 1;
  EXPECT_TRUE(read_decimal("0", kAny, value));
  EXPECT_EQ(value, 0u);
  EXPECT_TRUE(read_decimal("18446744073709551615", kAny, value));
  EXPECT_EQ(value, kAny);
  EXPECT_TRUE(read_decimal("255", 255, value));
  for (const char* text :
       {"", "00", "01", "-1", "+1", " 1", "1 ", "1a", "18446744073709551616", "99999999999999999999"}) {
    EXPECT_FALSE(read_decimal(text, kAny, value)) << text;
  }
  EXPECT_FALSE(read_decimal("256", 255, value));
  EXPECT_EQ(value, 255u);
}

TEST(Text, Hex64ComesBack) {
  for (std::uint64_t value : {std::uint64_t{0}, std::uint64_t{0x0123456789abcdef}, kAny}) {
    std::string text;
    append_hex64(text, value);
    std::uint64_t found = 1;
    ASSERT_TRUE(read_hex64(text, found)) << text;
    EXPECT_EQ(found, value);
  }
  std::uint64_t value = 7;
  for (const char* text : {"", "0123456789abcde", "0123456789abcdef0", "0123456789ABCDEF", "0x23456789abcdef"}) {
    EXPECT_FALSE(read_hex64(text, value)) << text;
  }
  EXPECT_EQ(value, 7u);
}

// All one-byte changes of sequences at the edges of UTF-8, judged by another implementation.
TEST(Text, Utf8AgreesWithAnotherJudge) {
  for (std::string text : {"a", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80", "\xef\xbf\xbf",
                           "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf", "12345678\xc3\xa9", "1234567\xc3\xa9"}) {
    EXPECT_TRUE(is_utf8(text));
    EXPECT_EQ(is_utf8(text.substr(0, text.size() - 1)), text == "a");
    for (std::size_t i = 0; i < text.size(); ++i) {
      for (int byte = 0x20; byte < 256; ++byte) {
        if (byte == '"' || byte == '\\') continue;
        std::string other = text;
        other[i] = static_cast<char>(byte);
        EXPECT_EQ(is_utf8(other), nlohmann::json::accept('"' + other + '"')) << shown(other);
      }
    }
  }
}

TEST(Text, JsonStringsComeBackAndAreJson) {
  std::string all;
  for (int byte = 0; byte < 0x80; ++byte) all += static_cast<char>(byte);
  for (const std::string& text :
       {std::string(), std::string("plain"), all, std::string("\"\"\\\\"), all + "\xc3\xa9" + all}) {
    std::string written;
    append_json_string(written, text);
    EXPECT_EQ(nlohmann::json::parse(written).get<std::string>(), text);
    Cursor cursor(written, "test");
    std::string storage;
    EXPECT_EQ(cursor.json_string(storage), text);
    EXPECT_TRUE(cursor.at_end());
  }
}

TEST(Text, ShownIsPrintable) {
  EXPECT_EQ(shown("a\n\xff"), "'a\\x0a\\xff'");
  EXPECT_EQ(shown(std::string(65, 'x')), "'" + std::string(64, 'x') + "...'");
}

}  // namespace
}  // namespace prefixcache::layout
