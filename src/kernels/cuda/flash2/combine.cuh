// SPDX-License-Identifier: Apache-2.0
// The partials of split sequences to outputs: a query head of a token a warp, always in the order
// of the splits, so that the same partials give the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/step.cuh"
#include "kernels/cuda/common/tensor_core.cuh"
#include "kernels/cuda/flash2/finish.cuh"

namespace octavo::kernels::flash2 {

inline constexpr int kCombineThreads = 128;
inline constexpr int kPerLane = 4;    ///< Elements of a 16-byte load of F32.
inline constexpr int kLaneLoads = 4;  ///< Of the widest partial row, 512.

/// Heads first_head … of a token, one a warp.
__device__ inline void combine_heads(const Work& w, std::int64_t token, int first_head) {
  const AttendParams& a = w.attend;
  const cuda::TokenPlace place = cuda::place_of_token(a.batch, token);
  if (place.b < 0) return;
  const std::int32_t splits = w.cut.num_splits[place.b];
  if (splits <= 1) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int head = first_head + static_cast<int>(threadIdx.x) / kLanes;
  if (head >= a.num_q_heads) return;
  const std::int64_t first =
      (w.cut.partial_offsets[place.b] + std::int64_t{place.i} * splits) * a.num_q_heads + head;
  const RowStats* parts = w.stats + first;
  float max = -INFINITY;
#pragma unroll 4
  for (std::int32_t j = 0; j < splits; ++j)
    max = fmaxf(max, parts[std::int64_t{j} * a.num_q_heads].base);
  const float base = finite_base(max);
  RowStats stats{max};
  float out[kLaneLoads][kPerLane] = {};
  // A part that saw no key is 0, and its share too.
#pragma unroll 4
  for (std::int32_t j = 0; j < splits; ++j) {
    const std::int64_t at = std::int64_t{j} * a.num_q_heads;
    const float share = cuda::fast_exp2(parts[at].base - base);
    add_stats(stats, parts[at], share);
#pragma unroll
    for (int n = 0; n < kLaneLoads; ++n) {
      const int d = (n * kLanes + lane) * kPerLane;
      if (d >= w.dim) continue;
      const float4 values = *reinterpret_cast<const float4*>(w.partials + (first + at) * w.dim + d);
      out[n][0] += values.x * share;
      out[n][1] += values.y * share;
      out[n][2] += values.z * share;
      out[n][3] += values.w * share;
    }
  }
  if (lane == 0) write_lse(a, token, head, stats);
  const float factor = factor_of(a, head, stats);
  const std::int64_t to =
      cuda::token_offset(a.out_layout, a.batch, place.b, place.i) + head * a.out_layout.head_stride;
#pragma unroll
  for (int n = 0; n < kLaneLoads; ++n) {
    for (int e = 0; e < kPerLane; ++e) {
      const int d = (n * kLanes + lane) * kPerLane + e;
      if (d < a.head_dim_v) cuda::store_element(a.out, a.out_dtype, to + d, out[n][e] * factor);
    }
  }
}

}  // namespace octavo::kernels::flash2
