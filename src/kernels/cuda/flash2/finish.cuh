// SPDX-License-Identifier: Apache-2.0
// What becomes of a row once all of its keys are summed: the factor of its output, and its LSE.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/flash2/work.h"

namespace octavo::kernels::flash2 {

inline constexpr int kLanes = 32;
inline constexpr float kLog2E = 1.44269504F;
inline constexpr float kLn2 = 0.693147181F;

/// What a row's exponents are counted from. It has no base where it has seen no key: weights 0.
__device__ inline float finite_base(float base) { return base == -INFINITY ? 0.0F : base; }

/// sums += part; `share`: 2^(the part's base - that of the sums).
__device__ inline void add_stats(RowStats& sums, const RowStats& part, float share) {
  sums.sum += part.sum * share;
  sums.exact += part.exact * share;
}

/// What a row's sum of weighted values is multiplied with, the sink in it. Relative to the larger
/// of the two, so that neither exponential overflows.
__device__ inline float factor_of(const AttendParams& a, int head, RowStats stats) {
  if (stats.sum == 0.0F) return 0.0F;
  if (a.sinks == nullptr) return __fdividef(1.0F, stats.sum);
  const float sink = a.sinks[head] * kLog2E;
  if (sink <= stats.base) return __fdividef(1.0F, stats.sum + exp2f(sink - stats.base));
  const float shrink = exp2f(stats.base - sink);
  return __fdividef(shrink, stats.sum * shrink + 1.0F);
}

/// `token` counts all of the step's.
__device__ inline void write_lse(const AttendParams& a, std::int64_t token, std::int32_t head,
                                 RowStats stats) {
  if (a.lse == nullptr) return;
  a.lse[token * a.lse_token_stride + head * a.lse_head_stride] =
      stats.exact == 0.0F ? -INFINITY : (stats.base + log2f(stats.exact)) * kLn2;
}

}  // namespace octavo::kernels::flash2
