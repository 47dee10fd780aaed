// SPDX-License-Identifier: Apache-2.0
// What the readers of files and specs throw: the input is unreadable or wrong in itself.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

namespace octavo::testkit {

/// `what()` is one line: "thing: wanted …, got …".
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Foreign text as it may be shown: on one line, control characters escaped, cut when longer than
/// `longest` bytes.
std::string printable(std::string_view text, std::size_t longest = 120);

}  // namespace octavo::testkit
