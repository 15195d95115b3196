#include "hash/sha256.h"

#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include "hash/encode.h"

namespace prefixcache::hash {
namespace {

// Messages and digests of FIPS 180-4's examples.
TEST(Sha256, KnownDigests) {
  EXPECT_EQ(sha256({}).hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256(as_bytes("abc")).hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256(as_bytes(std::string(1000000, 'a'))).hex(),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesGiveTheDigestOfTheWhole) {
  const std::string text(1000, 'x');
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, std::size_t{63}, std::size_t{64}, std::size_t{999}}) {
    Sha256 sha;
    for (std::size_t at = 0; at < text.size(); at += piece) {
      sha.update(as_bytes(std::string_view(text).substr(at, piece)));
    }
    EXPECT_EQ(sha.finish(), sha256(as_bytes(text))) << piece;
  }
}

TEST(Sha256, ACopyGoesOnAlone) {
  for (const std::size_t common : {std::size_t{0}, std::size_t{5}, std::size_t{64}, std::size_t{100}}) {
    const std::string head(common, 'h');
    Sha256 first;
    first.update(as_bytes(head));
    Sha256 second = first;
    first.update(as_bytes("one"));
    second.update(as_bytes("two"));
    EXPECT_EQ(first.finish(), sha256(as_bytes(head + "one")));
    EXPECT_EQ(second.finish(), sha256(as_bytes(head + "two")));
  }
}

}  // namespace
}  // namespace prefixcache::hash
