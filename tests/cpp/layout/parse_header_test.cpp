// Headers with a checksum that matches and a meaning that must be refused, each with a reason that names it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "layout/sample_headers.h"
#include "support/watched_heap.h"

namespace prefixcache::layout::testing {
namespace {

using prefixcache::testing::allocated;
using prefixcache::testing::largest;
using ::testing::HasSubstr;

// One F32 tensor of 2 x 3 rows x 4, one U8 of 3 rows.
PartHeader plain_header() {
  PartHeader header;
  header.key = key_of("key");
  header.parent = key_of("parent");
  header.depth = 8;
  header.row_lo = 5;
  header.row_hi = 8;
  header.tokens = {10, 20, 30, 40};
  header.meta = "meta";
  header.tensors = {tensor("a", mlx::core::float32, {2, 3, 4}, 1), tensor("b", mlx::core::uint8, {3}, 0)};
  place_tensors(header.tensors);
  return header;
}

constexpr std::uint64_t kPlainData = 99;

void expect_refused(const std::string& file, std::uint64_t data, const char* reason) {
  allocated = largest = 0;
  const Parsed parsed = parse(file, file.size() + data);
  // The reason itself is text of a bounded length.
  EXPECT_LE(largest, file.size() + data + 512) << reason;
  EXPECT_EQ(parsed.status.code(), StatusCode::Corrupt) << reason;
  EXPECT_THAT(parsed.status.message(), HasSubstr(reason));
  EXPECT_EQ(parsed.header, PartHeader{}) << reason;
  EXPECT_EQ(parsed.data_offset, 0u) << reason;
}

void expect_refused(std::string_view from, const std::string& to, const char* reason) {
  expect_refused(forge(plain_header(), from, to), kPlainData, reason);
}

TEST(ParseHeader, AcceptsThePlainHeader) {
  const std::string file = forge(plain_header(), "meta\":\"meta", "meta\":\"other");
  const Parsed parsed = parse(file, file.size() + kPlainData);
  ASSERT_TRUE(parsed.status.is_ok()) << parsed.status.message();
  EXPECT_EQ(parsed.header.meta, "other");
}

TEST(ParseHeader, RefusesLengths) {
  const std::string file = encode_header(plain_header());
  auto with_length = [&](std::uint64_t length) {
    std::string forged = file;
    for (int i = 0; i < 8; ++i) forged[i] = static_cast<char>(length >> (8 * i));
    return forged;
  };
  for (std::uint64_t length : {std::uint64_t{0}, std::uint64_t{1}, file.size() - 9, file.size() - 7,
                               file.size() + kPlainData, std::uint64_t{1} << 32, std::uint64_t{1} << 63,
                               ~std::uint64_t{0}, ~std::uint64_t{0} - 7, ~std::uint64_t{0} - 6}) {
    expect_refused(with_length(length), kPlainData, "a header of");
  }
  // Longer than v1 allows, in a file that would be long enough.
  const std::uint64_t huge = (std::uint64_t{64} << 20) + 56;
  const Parsed parsed = parse(with_length(huge), std::uint64_t{1} << 40);
  EXPECT_EQ(parsed.status.code(), StatusCode::Corrupt);
  // The longest that is allowed is asked for.
  const Parsed longest = parse(with_length((std::uint64_t{64} << 20) - 8), std::uint64_t{1} << 40);
  EXPECT_EQ(longest.status.code(), StatusCode::NotFound);
  EXPECT_EQ(longest.needed, std::uint64_t{64} << 20);
}

TEST(ParseHeader, RefusesTextThatV1DoesNotWrite) {
  expect_refused("prefixcache.v1", "prefixcache.v2", "prefixcache.v2");
  expect_refused("{\"__metadata__\"", " {\"__metadata__\"", "header, byte 0");
  expect_refused("\"key\":", "\"key\": ", "expected");
  expect_refused("\"meta\":", "\"more\":\"x\",\"meta\":", "\"more\"");
  expect_refused("\"meta\":\"meta\"", "\"meta\":7", "expected");
  expect_refused("\"meta\":\"meta\"", "\"meta\":null", "expected");
  expect_refused("\"meta\":\"meta\"", "\"meta\":\"\\u0041\"", "an escape that v1 does not write");
  expect_refused("\"meta\":\"meta\"", "\"meta\":\"\\n\"", "an escape that v1 does not write");
  expect_refused("\"meta\":\"meta\"", "\"meta\":\"\\ud800\"", "an escape that v1 does not write");
  expect_refused("\"meta\":\"meta\"", "\"meta\":\"\\u001F\"", "an escape that v1 does not write");
  expect_refused("\"meta\":\"meta\"", "\"meta\":\"\n\"", "a control character");
  expect_refused("\"meta\":\"meta\"", "\"meta\":\"\xff\"", "meta is not UTF-8");
  expect_refused("\"meta\":\"meta\"", "\"meta\":\"\xc0\xaf\"", "meta is not UTF-8");
  expect_refused("\"dtype\":\"F32\"", "\"dtype\":\"F32\",\"x\":1", "expected");
  expect_refused("]}}", "]}", "header, byte");
  expect_refused("]}}", "]},\"c\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[99,99]}}", "expected '}'");
  expect_refused("]}}", "]}}}", "header, byte");
  expect_refused("]}}", "]}}" + std::string(64, ' '), "more padding than alignment needs");
}

TEST(ParseHeader, RefusesAStringWithoutAnEnd) {
  const std::string json = json_of(encode_header(plain_header()));
  expect_refused(seal(json.substr(0, json.find("\"tensors\":\"") + 15)), kPlainData, "a string without an end");
  expect_refused(seal(json.substr(0, json.find("\"tokens\":\"") + 13)), kPlainData, "no '\"' ends it");
}

TEST(ParseHeader, RefusesDeepJson) {
  for (const char* bracket : {"[", "{\"a\":"}) {
    std::string deep;
    for (int i = 0; i < 100000; ++i) deep += bracket;
    expect_refused("\"meta\":\"meta\"", "\"meta\":" + deep, "expected");
    expect_refused("\"shape\":[3]", "\"shape\":" + deep, "expected");
  }
}

TEST(ParseHeader, RefusesNumbers) {
  for (const char* depth : {"", "08", "-8", "+8", "8.0", "8e0", " 8", "0x8", "9223372036854775808",
                            "18446744073709551624", "340282366920938463463374607431768211464"}) {
    expect_refused("\"depth\":\"8\"", "\"depth\":\"" + std::string(depth) + "\"", "header, byte");
  }
  expect_refused("\"depth\":\"8\"", "\"depth\":\"3\"", "depth 3 is below the 4 tokens");
  expect_refused("\"depth\":\"8\"", "\"depth\":8", "expected");
  expect_refused("5:8", "5:9", "rows [5, 9)");
  expect_refused("5:8", "6:8", "3 rows along axis 1, expected those of [6, 8)");
  expect_refused("5:8", "8:5", "rows [8, 5)");
  expect_refused("5:8", "-5:8", "header, byte");
  expect_refused("5:8", "5:8:8", "expected");
  expect_refused("10,20", "10,,20", "tokens, byte 3");
  expect_refused("10,20", ",10,20", "tokens, byte 0");
  expect_refused("10,20,30,40", "", "tokens, byte 0");
  expect_refused("30,40", "30,40,", "tokens, byte 12");
  expect_refused("10,20", "10,4294967296", "4294967296");
  expect_refused("10,20", "10,020", "020");
  expect_refused("\"part\":\"kv\"", "\"part\":\"KV\"", "part 'KV'");
  expect_refused("\"key\":\"", "\"key\":\"A", "64 lower-case hexadecimal digits");
}

TEST(ParseHeader, RefusesContent) {
  const std::string digest = key_of("image").hex();
  auto refused = [&](const std::string& content, const char* reason) {
    expect_refused("\"content\":\"\"", "\"content\":\"" + content + "\"", reason);
  };
  refused("4:9", "content, byte 3");
  refused("4:9:" + digest.substr(1), "content, byte 4");
  refused("4:9:" + digest + ",", "content, byte 69");
  refused("4:9:" + digest + ";4:9:" + digest, "content, byte 68");
  refused("-1:9:" + digest, "content, byte 0");
  refused("3:9:" + digest, "content range [3, 9)");
  refused("8:9:" + digest, "content range [8, 9)");
  refused("4:4:" + digest, "content range [4, 4)");
  refused("4:9223372036854775808:" + digest, "content, byte 2");
}

TEST(ParseHeader, RefusesTensors) {
  expect_refused("\"shape\":[2,3,4]", "\"shape\":[2,3,9223372036854775808]", "header, byte");
  expect_refused("\"shape\":[2,3,4]", "\"shape\":[2,3,2147483648]", "header, byte");
  expect_refused("\"shape\":[2,3,4]", "\"shape\":[2147483647,3,2147483647,2147483647]", "more than 2^63 bytes");
  expect_refused("\"shape\":[2,3,4]", "\"shape\":[2147483647,3,4]", "96 bytes, expected");
  expect_refused("\"shape\":[2,3,4]", "\"shape\":[2,3,-4]", "header, byte");
  expect_refused("\"shape\":[2,3,4]", "\"shape\":[2,3,4.0]", "header, byte");
  expect_refused("\"shape\":[2,3,4]", "\"shape\":[2,3,4,]", "header, byte");
  expect_refused("\"shape\":[2,3,4]", "\"shape\":[2,3,4", "header, byte");
  expect_refused("\"shape\":[2,3,4]", "\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,2,3,4]", "more than 16 axes");
  expect_refused("\"shape\":[2,3,4]", "\"shape\":[3,2,4]", "2 rows along axis 1");
  expect_refused("\"shape\":[2,3,4]", "\"shape\":[24]", "sequence axis 1 of a tensor with 1 axes");
  expect_refused("\"dtype\":\"F32\"", "\"dtype\":\"F64\"", "96 bytes, expected 192");
  expect_refused("\"dtype\":\"F32\"", "\"dtype\":\"I8\"", "96 bytes, expected 24");
  expect_refused("\"dtype\":\"F32\"", "\"dtype\":\"f32\"", "dtype 'f32'");
  expect_refused("\"dtype\":\"F32\"", "\"dtype\":\"F8_E4M3\"", "dtype 'F8_E4M3'");
  expect_refused("\"dtype\":\"F32\"", "\"dtype\":\"\"", "dtype ''");
  expect_refused("1:a", "1:c", "expected tensor 'c', found 'a'");
  expect_refused(",\"a\":{", ",\"../../x\":{", "found '../../x'");
  expect_refused("1:b", "7:b", "expected 7 more bytes");
  expect_refused("1:a", "257:a", "up to 256");
  expect_refused("\"tensors\":\"1:", "\"tensors\":\"16:", "up to 15");
  expect_refused("\"tensors\":\"1:", "\"tensors\":\"-2:", "tensors, byte 0");
}

TEST(ParseHeader, RefusesOverlapsAndHoles) {
  expect_refused("[0,96]", "[96,0]", "end before they begin");
  expect_refused("[0,96]", "[1,97]", "data at 1, expected at 0");
  expect_refused("[96,99]", "[95,98]", "data at 95, expected at 96");
  expect_refused("[96,99]", "[97,100]", "data at 97, expected at 96");
  expect_refused("[96,99]", "[-96,99]", "header, byte");
  expect_refused("[96,99]", "[96,9223372036854775808]", "header, byte");
  expect_refused("[96,99]", "[96,9223372036854775807]", "expected 3");
  // In the order that they were put, which is not the order by item size.
  expect_refused(
      "\"dtype\":\"F32\",\"shape\":[2,3,4],\"data_offsets\":[0,96]},\"b\":{\"dtype\":\"U8\",\"shape\":[3],"
      "\"data_offsets\":[96,99]",
      "\"dtype\":\"F32\",\"shape\":[2,3,4],\"data_offsets\":[3,99]},\"b\":{\"dtype\":\"U8\",\"shape\":[3],"
      "\"data_offsets\":[0,3]",
      "data at 3, expected at 0");
  expect_refused(encode_header(plain_header()), kPlainData - 1, "99 bytes in a file with 98");
  expect_refused(encode_header(plain_header()), kPlainData + 1, "99 bytes in a file with 100");
}

TEST(ParseHeader, RefusesDataThatEndAboveTheLargestFile) {
  PartHeader header = plain_header();
  constexpr int kMost = 2147483647;
  header.tensors = {tensor("a", mlx::core::uint8, {kMost, kMost}), tensor("b", mlx::core::uint8, {kMost, kMost}),
                    tensor("c", mlx::core::uint8, {kMost, kMost})};
  place_tensors(header.tensors);
  EXPECT_THROW(encode_header(header), std::invalid_argument);
  header.tensors.pop_back();
  const std::string file = encode_header(header);
  expect_refused(file, 99, "bytes in a file with 99");
  expect_refused(file, ~std::uint64_t{0} - file.size(), "bytes in a file with");
}

TEST(ParseHeader, RefusesDuplicateAndReservedNames) {
  PartHeader header = plain_header();
  std::string json = json_of(encode_header(header));
  auto replace = [&json](std::string_view from, std::string_view to) {
    json.replace(json.find(from), from.size(), to);
  };
  replace("1:b", "1:a");
  replace(",\"b\":{", ",\"a\":{");
  expect_refused(seal(json), kPlainData, "tensor name 'a' occurs twice");

  json = json_of(encode_header(header));
  replace("1:b", "12:__metadata__");
  replace(",\"b\":{", ",\"__metadata__\":{");
  expect_refused(seal(json), kPlainData, "'__metadata__'");

  json = json_of(encode_header(header));
  replace("1:b", "2:\xc3(");
  replace(",\"b\":{", ",\"\xc3(\":{");
  expect_refused(seal(json), kPlainData, "'\\xc3('");
}

TEST(ParseHeader, ChecksTheChecksumBeforeTheMeaning) {
  std::string file = encode_header(plain_header());
  const auto at = file.find("\"depth\":\"8\"") + 9;
  file[at] = 'x';
  expect_refused(file, kPlainData, "checksum does not match");
}

TEST(ParseHeader, MemoryFollowsTheBytesThatAreThere) {
  // The densest lists that a header can hold, each alone.
  PartHeader tensors = plain_header();
  tensors.tensors.clear();
  for (int i = 0; i < 1 << 16; ++i) tensors.tensors.push_back(tensor(std::to_string(i), mlx::core::uint8, {}));
  place_tensors(tensors.tensors);
  PartHeader tokens = plain_header();
  tokens.tensors.clear();
  tokens.depth = tokens.row_hi = 1 << 20;
  tokens.tokens.assign(1 << 20, 7);
  PartHeader content = plain_header();
  content.tensors.clear();
  content.content.assign(10000, {4, 5, Key{}});
  for (const PartHeader* header : {&tensors, &tokens, &content}) {
    const std::string file = encode_header(*header);
    allocated = largest = 0;
    const Parsed parsed = parse(file, file.size() + data_bytes(*header));
    ASSERT_TRUE(parsed.status.is_ok()) << parsed.status.message();
    EXPECT_LE(allocated, 4 * file.size());
  }

  expect_refused(forge(tokens, "7,7,", "7,7,7,"), 0, "more than 1048576 tokens");
  const std::string many = forge(tensors, "\"tensors\":\"", "\"tensors\":\"-1:0000000000000000:0:,");
  const Parsed parsed = parse(many, many.size() + (1 << 16));
  EXPECT_EQ(parsed.status.code(), StatusCode::Corrupt);
  EXPECT_THAT(parsed.status.message(), HasSubstr("more than 65536 tensors"));
}

}  // namespace
}  // namespace prefixcache::layout::testing
