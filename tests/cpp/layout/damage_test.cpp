// Headers that were damaged: every bit of every byte, and every length.
#include <gtest/gtest.h>

#include "layout/sample_headers.h"

namespace prefixcache::layout::testing {
namespace {

TEST(Damage, EveryFlippedBitOfASmallHeaderIsCorrupt) {
  const PartHeader header = small_header();
  const std::string file = encode_header(header);
  const std::uint64_t file_size = file.size() + data_bytes(header);
  for (std::size_t i = 0; i < file.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = file;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      // As a store reads it: the whole file is at hand, so that a longer header is no excuse.
      const std::string whole = damaged + std::string(data_bytes(header), '\0');
      const Parsed parsed = parse(whole, file_size);
      ASSERT_EQ(parsed.status.code(), StatusCode::Corrupt) << "byte " << i << ", bit " << bit;
      ASSERT_FALSE(parsed.status.message().empty());
      ASSERT_EQ(parsed.header, PartHeader{}) << "byte " << i << ", bit " << bit;
    }
  }
}

TEST(Damage, EveryFlippedByteOfALargeHeaderIsCorrupt) {
  std::mt19937 random(7);
  PartHeader header;
  do header = random_header(random);
  while (header.tensors.size() < 10);
  const std::string file = encode_header(header);
  const std::string whole = file + std::string(data_bytes(header), '\0');
  for (std::size_t i = 0; i < file.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 + random() % 255));
    ASSERT_EQ(parse(damaged, damaged.size()).status.code(), StatusCode::Corrupt) << "byte " << i;
  }
}

TEST(Damage, EveryShorterFileIsCorrupt) {
  const PartHeader header = small_header();
  const std::string whole = encode_header(header) + std::string(data_bytes(header), 'd');
  ASSERT_TRUE(parse(whole, whole.size()).status.is_ok());
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const Parsed parsed = parse(std::string_view(whole).substr(0, size), size);
    ASSERT_EQ(parsed.status.code(), StatusCode::Corrupt) << "cut to " << size << " bytes";
  }
}

TEST(Damage, ALongerFileIsCorrupt) {
  const PartHeader header = small_header();
  const std::string file = encode_header(header);
  for (std::uint64_t more : {1, 64, 1 << 20}) {
    EXPECT_EQ(parse(file, file.size() + data_bytes(header) + more).status.code(), StatusCode::Corrupt);
  }
}

TEST(Damage, EveryShorterPrefixAsksForMore) {
  const PartHeader header = small_header();
  const std::string file = encode_header(header);
  const std::uint64_t file_size = file.size() + data_bytes(header);
  for (std::size_t size = 0; size < file.size(); ++size) {
    const Parsed parsed = parse(std::string_view(file).substr(0, size), file_size);
    ASSERT_EQ(parsed.status.code(), StatusCode::NotFound) << size;
    ASSERT_GT(parsed.needed, size);
    ASSERT_LE(parsed.needed, file_size);
    ASSERT_TRUE(size < 8 || parsed.needed == file.size()) << size;
  }
}

}  // namespace
}  // namespace prefixcache::layout::testing
