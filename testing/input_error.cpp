// SPDX-License-Identifier: Apache-2.0
#include "testing/input_error.h"

#include <fmt/format.h>

namespace octavo::testkit {

std::string printable(std::string_view text, std::size_t longest) {
  std::string shown_text;
  for (const char c : text.substr(0, longest)) {
    const auto code = static_cast<unsigned char>(c);
    if (code < 0x20 || code == 0x7F) {
      shown_text += fmt::format("\\x{:02x}", code);
    } else {
      shown_text += c;
    }
  }
  if (text.size() > longest) shown_text += "...";
  return shown_text;
}

}  // namespace octavo::testkit
