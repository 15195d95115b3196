// text.h: the few spellings that v1 headers and file names are made of, written and read strictly.
//
// Threads: plain functions and values; any thread.
// Errors:  reading throws Malformed. It never leaves csrc/layout: parse_header makes a Status of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace prefixcache::layout {

// Bytes that are not what v1 writes.
struct Malformed {
  std::string reason;
};

// The one spelling of a number: digits without leading zeros. False if it is another, or above `max`.
bool read_decimal(std::string_view text, std::uint64_t max, std::uint64_t& out);

// Exactly 16 lower-case hexadecimal digits.
bool read_hex64(std::string_view text, std::uint64_t& out);
void append_hex64(std::string& out, std::uint64_t value);
inline constexpr std::size_t kHex64Digits = 16;

// A JSON string with its quotes. Of all the spellings JSON has for a text, v1 uses one: \" and \\ for these two
// characters, \u00xx in lower case for those below 0x20, and every other byte as it is.
void append_json_string(std::string& out, std::string_view text);

bool is_utf8(std::string_view text);

// Text for a message: bytes that are not printable ASCII spelled out, long ones cut.
std::string shown(std::string_view text);

// Reads a text from left to right.
class Cursor {
 public:
  // `what` names the text in messages and must outlive the cursor.
  Cursor(std::string_view text, std::string_view what) : text_(text), what_(what) {}

  bool at_end() const { return position_ == text_.size(); }
  bool next_is(char c) const { return position_ < text_.size() && text_[position_] == c; }
  std::string_view rest() const { return text_.substr(position_); }

  void expect(std::string_view literal);
  void expect_end();
  std::uint64_t decimal(std::uint64_t max);
  std::uint64_t hex64();
  std::string_view take(std::size_t count);
  // The bytes up to `stop`, which is consumed too.
  std::string_view until(char stop);
  // A JSON string. The result lies in the text itself, or in `storage` where the text has escapes.
  std::string_view json_string(std::string& storage);

  [[noreturn]] void fail(const std::string& reason) const;

 private:
  char unescape();

  std::string_view text_;
  std::string_view what_;
  std::size_t position_ = 0;
};

}  // namespace prefixcache::layout
