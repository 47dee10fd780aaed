// SPDX-License-Identifier: Apache-2.0
// Checked UTF-8.
#include "examples/generate/utf8.h"

#include <algorithm>

#include "examples/generate/error.h"

namespace generate {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
constexpr std::size_t kLongestInError = 80;

std::uint32_t byte_at(std::string_view text, std::size_t index) noexcept {
  return static_cast<unsigned char>(text[index]);
}

}  // namespace

Utf8Char first_char(std::string_view text) noexcept {
  const std::uint32_t lead = byte_at(text, 0);
  if (lead < 0x80) return {lead, 1, true, false};
  std::size_t length = 0;
  // The bounds of the second byte shut out overlong forms, surrogates and too large codes.
  std::uint32_t low = 0x80;
  std::uint32_t high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {0, 1, false, false};
  }
  char32_t code = lead & (0x7FU >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {0, i, false, true};
    const std::uint32_t next = byte_at(text, i);
    if (next < low || next > high) return {0, i, false, false};
    code = (code << 6U) | (next & 0x3FU);
    low = 0x80;
    high = 0xBF;
  }
  return {code, length, true, false};
}

std::optional<std::size_t> find_invalid(std::string_view text) noexcept {
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Char next = first_char(text.substr(at));
    if (!next.valid) return at;
    at += next.num_bytes;
  }
  return std::nullopt;
}

void append_utf8(std::string& text, char32_t code) {
  const auto put = [&text](char32_t bits) { text.push_back(static_cast<char>(bits)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | (code >> 6U));
    put(0x80 | (code & 0x3FU));
  } else if (code < 0x10000) {
    put(0xE0 | (code >> 12U));
    put(0x80 | ((code >> 6U) & 0x3FU));
    put(0x80 | (code & 0x3FU));
  } else {
    put(0xF0 | (code >> 18U));
    put(0x80 | ((code >> 12U) & 0x3FU));
    put(0x80 | ((code >> 6U) & 0x3FU));
    put(0x80 | (code & 0x3FU));
  }
}

std::string Utf8Stream::push(std::string_view bytes) {
  pending_.append(bytes);
  std::string text;
  std::size_t at = 0;
  while (at < pending_.size()) {
    const Utf8Char next = first_char(std::string_view(pending_).substr(at));
    if (next.cut_off) break;
    if (next.valid) {
      text.append(pending_, at, next.num_bytes);
    } else {
      text.append(kReplacement);
    }
    at += next.num_bytes;
  }
  pending_.erase(0, at);
  return text;
}

std::string Utf8Stream::finish() {
  if (pending_.empty()) return {};
  pending_.clear();
  return std::string(kReplacement);
}

std::string printable(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    if (out.size() >= kLongestInError) return out + "…";
    const Utf8Char next = first_char(text.substr(at));
    const bool control = next.code < 0x20 || (next.code >= 0x7F && next.code < 0xA0);
    if (next.valid && !control) {
      out.append(text, at, next.num_bytes);
    } else {
      for (std::size_t i = 0; i < next.num_bytes; ++i) {
        out += fmt::format("\\x{:02x}", byte_at(text, at + i));
      }
    }
    at += next.num_bytes;
  }
  return out;
}

}  // namespace generate
