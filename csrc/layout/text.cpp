#include "layout/text.h"

#include <cstring>

namespace prefixcache::layout {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

// The length of the UTF-8 sequence that starts `text`, or 0 if none does. Only shortest forms of real characters count.
std::size_t utf8_sequence(std::string_view text) {
  auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  std::size_t length = 0;
  unsigned char low = 0x80;
  unsigned char high = 0xbf;
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf)
    length = 2;
  else if (lead >= 0xe0 && lead <= 0xef)
    length = 3;
  else if (lead >= 0xf0 && lead <= 0xf4)
    length = 4;
  if (length == 0 || text.size() < length) return 0;
  if (lead == 0xe0) low = 0xa0;
  if (lead == 0xed) high = 0x9f;
  if (lead == 0xf0) low = 0x90;
  if (lead == 0xf4) high = 0x8f;
  if (byte(1) < low || byte(1) > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  return length;
}

}  // namespace

bool read_decimal(std::string_view text, std::uint64_t max, std::uint64_t& out) {
  if (text.empty() || (text.size() > 1 && text[0] == '0')) return false;
  std::uint64_t value = 0;
  for (char c : text) {
    if (c < '0' || c > '9') return false;
    const auto digit = static_cast<std::uint64_t>(c - '0');
    if (__builtin_mul_overflow(value, std::uint64_t{10}, &value)) return false;
    if (__builtin_add_overflow(value, digit, &value)) return false;
  }
  if (value > max) return false;
  out = value;
  return true;
}

bool read_hex64(std::string_view text, std::uint64_t& out) {
  if (text.size() != kHex64Digits) return false;
  std::uint64_t value = 0;
  for (char c : text) {
    const int digit = hex_value(c);
    if (digit < 0) return false;
    value = value << 4 | static_cast<std::uint64_t>(digit);
  }
  out = value;
  return true;
}

void append_hex64(std::string& out, std::uint64_t value) {
  for (int shift = 60; shift >= 0; shift -= 4) out += kHexDigits[value >> shift & 15];
}

void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      out += "\\u00";
      out += kHexDigits[byte >> 4];
      out += kHexDigits[byte & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    std::uint64_t eight = 0;
    if (text.size() >= sizeof eight) {
      std::memcpy(&eight, text.data(), sizeof eight);
      if ((eight & 0x8080808080808080u) == 0) {
        text.remove_prefix(sizeof eight);
        continue;
      }
    }
    const std::size_t length = utf8_sequence(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string shown(std::string_view text) {
  constexpr std::size_t kLongest = 64;
  std::string out = "'";
  for (char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += "\\x";
      out += kHexDigits[byte >> 4];
      out += kHexDigits[byte & 15];
    }
  }
  out += text.size() > kLongest ? "...'" : "'";
  return out;
}

void Cursor::fail(const std::string& reason) const {
  throw Malformed{std::string(what_) + ", byte " + std::to_string(position_) + ": " + reason};
}

void Cursor::expect(std::string_view literal) {
  if (!rest().starts_with(literal)) {
    fail("expected " + shown(literal) + ", found " + shown(rest().substr(0, literal.size())));
  }
  position_ += literal.size();
}

void Cursor::expect_end() {
  if (!at_end()) fail("expected the end, found " + shown(rest()));
}

std::uint64_t Cursor::decimal(std::uint64_t max) {
  std::size_t end = position_;
  while (end < text_.size() && text_[end] >= '0' && text_[end] <= '9') ++end;
  std::uint64_t value = 0;
  if (!read_decimal(text_.substr(position_, end - position_), max, value)) {
    const auto found = shown(end == position_ ? rest().substr(0, 1) : text_.substr(position_, end - position_));
    fail("expected a number up to " + std::to_string(max) + " without leading zeros, found " + found);
  }
  position_ = end;
  return value;
}

std::uint64_t Cursor::hex64() {
  std::uint64_t value = 0;
  const auto digits = rest().substr(0, kHex64Digits);
  if (!read_hex64(digits, value)) fail("expected 16 lower-case hexadecimal digits, found " + shown(digits));
  position_ += kHex64Digits;
  return value;
}

std::string_view Cursor::take(std::size_t count) {
  if (count > rest().size()) fail("expected " + std::to_string(count) + " more bytes");
  const auto taken = text_.substr(position_, count);
  position_ += count;
  return taken;
}

std::string_view Cursor::until(char stop) {
  const std::size_t found = rest().find(stop);
  if (found == std::string_view::npos) fail("no " + shown({&stop, 1}) + " ends it");
  const auto taken = take(found);
  ++position_;
  return taken;
}

std::string_view Cursor::json_string(std::string& storage) {
  expect("\"");
  const std::size_t start = position_;
  bool escaped = false;
  for (; position_ < text_.size(); ++position_) {
    const char c = text_[position_];
    if (c == '"') {
      const auto plain = text_.substr(start, position_ - start);
      ++position_;
      return escaped ? std::string_view(storage) : plain;
    }
    if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
    if (c == '\\' && !escaped) {
      escaped = true;
      storage.assign(text_.substr(start, position_ - start));
    }
    if (c == '\\')
      storage += unescape();
    else if (escaped)
      storage += c;
  }
  fail("a string without an end");
}

// Called at a backslash; leaves the position at the last character of the escape.
char Cursor::unescape() {
  const auto escape = rest().substr(0, 6);
  if (escape.size() >= 2 && (escape[1] == '"' || escape[1] == '\\')) {
    position_ += 1;
    return escape[1];
  }
  const bool control = escape.size() == 6 && escape.starts_with("\\u00") && (escape[4] == '0' || escape[4] == '1') &&
                       hex_value(escape[5]) >= 0;
  if (!control) fail("an escape that v1 does not write: " + shown(escape));
  position_ += 5;
  return static_cast<char>((escape[4] - '0') * 16 + hex_value(escape[5]));
}

}  // namespace prefixcache::layout
