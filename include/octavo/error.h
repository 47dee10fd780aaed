// SPDX-License-Identifier: Apache-2.0
// The one exception type of the library. Expected outcomes (out of pages, an unsupported
// combination asked about) are values instead: see PlanOutcome, ForkOutcome and Support.
#pragma once

#include <octavo/export.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace octavo {

enum class ErrorCode : std::uint8_t {
  InvalidArgument,  ///< An argument is wrong; nothing was changed.
  Unsupported,    ///< The named backend, or every backend, cannot run what was asked; lists what is
                  ///< missing.
  OutOfMemory,    ///< Memory of the host or of a device could not be had; nothing was changed.
  DeviceFailure,  ///< A device or its driver reported an error.
  NotCompiled,    ///< This build leaves out what was asked for; says what it has.
  Internal,       ///< A defect of the library itself.
};

/// The name of a code, e.g. "InvalidArgument".
OCTAVO_EXPORT const char* to_string(ErrorCode code) noexcept;

/// What the library throws. `what()` reads "argument: wanted …, got …", with a hint where one
/// helps.
class OCTAVO_EXPORT Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace octavo
