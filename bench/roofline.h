// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most: the two bounds that attention on a CPU runs into.
#pragma once

#include <cstdint>

namespace octavo::bench {

struct Roofline {
  double read_bytes_per_s = 0.0;  ///< DRAM, all threads reading.
  double flops_per_s = 0.0;       ///< F32 fused multiply-adds, two operations each, all threads.
};

/// Measures both with `num_threads` threads (0: OpenMP's default), over memory of at least 4 times
/// `cache_bytes`. Takes a second or two. The best of several readings: a bound is what was reached
/// once.
Roofline measure_roofline(std::int32_t num_threads, std::int64_t cache_bytes);

}  // namespace octavo::bench
