// SPDX-License-Identifier: Apache-2.0
// The partials of split sequences to outputs: a token a block, a query head a warp, always in the
// order of the splits, so that the same partials give the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/step.cuh"
#include "kernels/cuda/flash2/finish.cuh"

namespace octavo::kernels::flash2 {

inline constexpr int kCombineThreads = 128;
inline constexpr int kPerLane = 4;    ///< Elements of a 16-byte load of F32.
inline constexpr int kLaneLoads = 4;  ///< Of the widest partial row, 512.

__device__ inline void combine_token(const Work& w, std::int64_t token) {
  const AttendParams& a = w.attend;
  const cuda::TokenPlace place = cuda::place_of_token(a.batch, token);
  if (place.b < 0) return;
  const std::int32_t splits = w.cut.num_splits[place.b];
  if (splits <= 1) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t first_row = w.cut.partial_offsets[place.b] + std::int64_t{place.i} * splits;
  for (int head = static_cast<int>(threadIdx.x) / kLanes; head < a.num_q_heads;
       head += kCombineThreads / kLanes) {
    const std::int64_t first = first_row * a.num_q_heads + head;
    float max = -INFINITY;
    for (std::int32_t j = 0; j < splits; ++j)
      max = fmaxf(max, w.stats[first + std::int64_t{j} * a.num_q_heads].max);
    RowStats stats{max, 0.0F};
    float out[kLaneLoads][kPerLane] = {};
    for (std::int32_t j = 0; j < splits; ++j) {
      const std::int64_t at = first + std::int64_t{j} * a.num_q_heads;
      const RowStats part = w.stats[at];
      if (part.sum == 0.0F) continue;  // saw no key
      const float share = exp2f(part.max - max);
      stats.sum += part.sum * share;
#pragma unroll
      for (int n = 0; n < kLaneLoads; ++n) {
        const int d = (n * kLanes + lane) * kPerLane;
        if (d >= w.dim) continue;
        const float4 values = *reinterpret_cast<const float4*>(w.partials + at * w.dim + d);
        out[n][0] += values.x * share;
        out[n][1] += values.y * share;
        out[n][2] += values.z * share;
        out[n][3] += values.w * share;
      }
    }
    if (lane == 0) write_lse(a, token, head, stats);
    const float factor = factor_of(a, head, stats);
    const std::int64_t to = cuda::token_offset(a.out_layout, a.batch, place.b, place.i) +
                            head * a.out_layout.head_stride;
#pragma unroll
    for (int n = 0; n < kLaneLoads; ++n) {
      for (int e = 0; e < kPerLane; ++e) {
        const int d = (n * kLanes + lane) * kPerLane + e;
        if (d < a.head_dim_v) cuda::store_element(a.out, a.out_dtype, to + d, out[n][e] * factor);
      }
    }
  }
}

}  // namespace octavo::kernels::flash2
