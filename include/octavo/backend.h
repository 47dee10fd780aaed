// SPDX-License-Identifier: Apache-2.0
// Which backends there are, which can run a step, and why not.
#pragma once

#include <octavo/export.h>
#include <octavo/types.h>

#include <string>
#include <vector>

namespace octavo {

/// Whether one backend can run something, and what decided it. Features are short phrases, e.g.
/// "dtype bf16".
struct Support {
  Backend backend = Backend::Auto;
  bool ok = false;
  std::vector<std::string> required;   ///< What the step needs.
  std::vector<std::string> supported;  ///< What of that the backend has.
  std::vector<std::string> missing;    ///< What it lacks; empty exactly when ok.
};

/// Every backend's answer for one step, and the choice.
struct Explanation {
  Backend chosen = Backend::Auto;  ///< Auto: none can run it.
  std::string reason;              ///< Why that one, in a sentence.
  std::vector<Support> backends;   ///< In order of preference.

  [[nodiscard]] OCTAVO_EXPORT std::string to_string() const;
};

/// A backend of this build on this machine.
struct BackendInfo {
  Backend backend = Backend::Auto;
  bool compiled = false;
  bool usable = false;      ///< On this machine, now.
  std::string description;  ///< What it is, in a line; with versions where there are any.
  std::string why_not;      ///< Empty when usable.
};

/// All backends, usable or not. Never throws for a missing device or library; that is what it
/// reports.
OCTAVO_EXPORT std::vector<BackendInfo> backends();

/// The instruction set that the CPU kernels use on this machine, e.g. "AVX3_ZEN4".
OCTAVO_EXPORT std::string cpu_target();

}  // namespace octavo
