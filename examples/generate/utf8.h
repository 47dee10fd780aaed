// SPDX-License-Identifier: Apache-2.0
// UTF-8, checked: prompts come in as it, and text that is generated token by token goes out as it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace generate {

/// One character at the front of some text.
struct Utf8Char {
  char32_t code = 0;
  std::size_t num_bytes = 0;  ///< Of the character or, when it is broken, of its broken beginning.
  bool valid = false;
  bool cut_off = false;  ///< Not valid, but only because the text ends too early.
};

/// The character at the front of `text`, which is not empty. Overlong forms, surrogates and codes
/// beyond U+10FFFF are not valid.
Utf8Char first_char(std::string_view text) noexcept;

/// Where `text` stops being UTF-8, in bytes; nothing when it never does.
std::optional<std::size_t> find_invalid(std::string_view text) noexcept;

/// Bytes of a character's code.
void append_utf8(std::string& text, char32_t code);

/// Makes valid UTF-8 of bytes that arrive in pieces, cut anywhere.
class Utf8Stream {
 public:
  /// The characters that `bytes` completes. What cannot become UTF-8 turns into U+FFFD; an
  /// incomplete end waits for its rest.
  std::string push(std::string_view bytes);

  /// No more bytes will come: U+FFFD for an incomplete end, if there is one.
  std::string finish();

 private:
  std::string pending_;
};

}  // namespace generate
