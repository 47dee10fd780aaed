// SPDX-License-Identifier: Apache-2.0
// The machine that a measurement was made on, as far as the system tells.
#pragma once

#include <cstdint>
#include <string>

namespace octavo::bench {

struct Machine {
  std::string cpu_model;
  std::int64_t cache_bytes = 0;      ///< Last-level cache that the first core sees.
  std::int64_t memory_bytes = 0;     ///< All of it.
  std::int64_t available_bytes = 0;  ///< What could be taken now.
};

Machine this_machine();

/// The first line of a text file; empty when there is none.
std::string first_line(const char* path);

}  // namespace octavo::bench
