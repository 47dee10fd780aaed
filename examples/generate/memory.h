// SPDX-License-Identifier: Apache-2.0
// Asks for memory only when the machine has it: the system hands out more than there is, and ends
// programs that use it.
#pragma once

#include <fmt/format.h>
#include <octavo/error.h>
#include <unistd.h>

namespace generate {

/// Errors: OutOfMemory when `bytes` is more than the machine's memory.
inline void demand_memory(const char* what, double bytes, const char* hint) {
  const double memory =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
  if (memory > 0 && bytes > memory) {
    throw octavo::Error(octavo::ErrorCode::OutOfMemory,
                        fmt::format("{}: wanted {:.2f} GiB, got a machine of {:.2f} GiB ({})", what,
                                    bytes / kGiB, memory / kGiB, hint));
  }
}

}  // namespace generate
