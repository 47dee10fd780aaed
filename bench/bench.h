// SPDX-License-Identifier: Apache-2.0
// The benchmark behind `octavo bench`: cases, their measurement, the report.
#pragma once

#include <octavo/types.h>

#include <cstdint>
#include <optional>
#include <regex>

namespace octavo::bench {

struct Options {
  std::optional<std::regex> filter;  ///< Of case names; none: all.
  bool quick = false;
  std::int32_t num_threads = 0;
  Backend backend = Backend::Auto;
  bool json = false;
};

/// Measures and prints, results on standard output, progress on standard error. False when no case
/// was measured.
bool run(const Options& options);

}  // namespace octavo::bench
