// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most: the two bounds that attention on a CPU runs into. `num_threads`
// of 0 is OpenMP's default. Each is the best of several readings: a bound is what was reached once.
#pragma once

#include <octavo/types.h>

#include <cstdint>
#include <memory>

namespace octavo::bench {

/// Fused multiply-adds, two operations each, all threads: of F32, or of BF16 with sums in F32,
/// which some processors do twice as fast. Takes a second or two.
double peak_flops_per_s(std::int32_t num_threads, DType dtype);

/// What one measurement of DRAM takes at least.
inline constexpr double kReadingSeconds = 0.15;

/// Reads DRAM with all threads: memory of at least 4 times `cache_bytes`, kept from reading to
/// reading, so that the bandwidth can be taken beside every case. Shared machines change it within
/// minutes.
class DramReader {
 public:
  DramReader(std::int32_t num_threads, std::int64_t cache_bytes);
  ~DramReader();
  DramReader(const DramReader&) = delete;
  DramReader& operator=(const DramReader&) = delete;

  /// The fastest of the readings of all that memory in about `seconds`, of one at least.
  [[nodiscard]] double bytes_per_s(double seconds) const;

 private:
  struct Parts;
  int num_threads_;
  std::unique_ptr<Parts> parts_;
};

}  // namespace octavo::bench
