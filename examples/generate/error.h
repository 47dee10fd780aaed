// SPDX-License-Identifier: Apache-2.0
// How this program refuses: one line "what: wanted …, got … (hint)", thrown as octavo::Error.
#pragma once

#include <fmt/format.h>
#include <octavo/error.h>

#include <string>
#include <string_view>
#include <utility>

namespace generate {

template <typename... ArgsT>
[[noreturn]] void fail(fmt::format_string<ArgsT...> format, ArgsT&&... args) {
  throw octavo::Error(octavo::ErrorCode::InvalidArgument,
                      fmt::format(format, std::forward<ArgsT>(args)...));
}

/// Text of unknown origin, fit for an error line: cut to a bearable length, without control bytes.
std::string printable(std::string_view text);

}  // namespace generate
