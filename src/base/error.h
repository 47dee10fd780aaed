// SPDX-License-Identifier: Apache-2.0
// The one formatter of error messages, and the check macros. A message is "argument: wanted W, got
// G (hint)", where W and G are printed from the very values that were compared.
#pragma once

#include <fmt/format.h>
#include <octavo/error.h>

#include <string>
#include <string_view>

namespace octavo::base {

template <typename WantedT, typename GotT>
std::string mismatch_text(std::string_view argument, const WantedT& wanted, const GotT& got,
                          std::string_view hint = {}) {
  std::string text = fmt::format("{}: wanted {}, got {}", argument, wanted, got);
  if (!hint.empty()) text += fmt::format(" ({})", hint);
  return text;
}

/// Throws InvalidArgument.
template <typename WantedT, typename GotT>
[[noreturn]] void throw_mismatch(std::string_view argument, const WantedT& wanted, const GotT& got,
                                 std::string_view hint = {}) {
  throw Error(ErrorCode::InvalidArgument, mismatch_text(argument, wanted, got, hint));
}

/// Throws Internal: a defect of ours.
[[noreturn]] void throw_internal(const char* condition, const char* file, int line);

}  // namespace octavo::base

/// Holds for every input a user can give; a failure is a defect of the library.
#define OCTAVO_CHECK(condition)       \
  ((condition) ? static_cast<void>(0) \
               : ::octavo::base::throw_internal(#condition, __FILE__, __LINE__))

/// As OCTAVO_CHECK, in builds with OCTAVO_ASSERTS only.
#if defined(OCTAVO_ENABLE_ASSERTS)
#define OCTAVO_ASSERT(condition) OCTAVO_CHECK(condition)
#else
#define OCTAVO_ASSERT(condition) static_cast<void>(0)
#endif
