// SPDX-License-Identifier: Apache-2.0
// What a warp does with sixteen rows of q and some keys in shared memory: scores, logits, weights,
// and the weighted sum of values, all in registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/flash2/finish.cuh"
#include "kernels/cuda/flash2/tile.cuh"

namespace octavo::kernels::flash2 {

/// A thread's share of a warp's scores: elements 0, 1 of row lane / 4 and 2, 3 of the row 8 below,
/// at keys 8 n + 2 (lane % 4) + {0, 1}. Two rows a thread.
struct RowMask {
  std::int32_t begin[2] = {0, 0};  ///< Keys that the row sees.
  std::int32_t end[2] = {0, 0};
  std::int32_t position[2] = {0, 0};
  float slope[2] = {0.0F, 0.0F};  ///< In units of log2(e).
};

/// The token and query head of row `row` of the item's tile; false where there is none.
struct RowPlace {
  bool exists = false;
  std::int32_t token = 0;
  std::int32_t head = 0;
};
__device__ inline RowPlace place_of_row(const Item& item, int row) {
  if (row >= item.num_rows()) return {};
  return {true, item.first_token + row / item.num_heads, item.first_head + row % item.num_heads};
}

__device__ inline RowMask row_mask(const Work& w, const Item& item, int first_row) {
  const AttendParams& a = w.attend;
  RowMask mask;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowPlace place = place_of_row(item, first_row + 8 * r);
    if (!place.exists) continue;
    const std::int64_t position = item.first_position + place.token - item.first_token;
    const KeyRange keys =
        visible_keys(a.causal, a.window_left, a.window_right, position, item.kv_len);
    mask.begin[r] = static_cast<std::int32_t>(keys.begin);
    mask.end[r] = static_cast<std::int32_t>(keys.end);
    mask.position[r] = static_cast<std::int32_t>(position);
    if (a.alibi_slopes != nullptr) mask.slope[r] = a.alibi_slopes[place.head] * kLog2E;
  }
  return mask;
}

/// Of kTiles products of 16 rows x 8 keys.
template <int kTiles>
using Scores = float[kTiles][4];

/// scores = q kᵀ of 16 rows from first_row on, and the keys from first_key on.
template <typename T, int kDim, int kTiles>
__device__ void multiply_keys(Scores<kTiles>& scores, SmemAddress q, int first_row, SmemAddress k,
                              int first_key, int lane) {
#pragma unroll
  for (auto& score : scores) {
    for (float& value : score) value = 0.0F;
  }
  const int matrix = lane / 8;
  const int q_row = first_row + matrix % 2 * 8 + lane % 8;
  const int k_row = first_key + matrix / 2 * 8 + lane % 8;
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    std::uint32_t rows[4];
    cuda::load_matrices(rows, q + place_of<kDim>(q_row, 2 * d + matrix / 2));
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      std::uint32_t keys[4];
      cuda::load_matrices(keys, k + place_of<kDim>(n * 8 + k_row, 2 * d + matrix % 2));
      cuda::multiply_add<T>(scores[n], rows, keys[0], keys[1]);
      cuda::multiply_add<T>(scores[n + 1], rows, keys[2], keys[3]);
    }
  }
}

/// out += weights v of the keys from first_key on; the weights are rounded to T.
template <typename T, int kDim, int kTiles>
__device__ void multiply_values(float (&out)[kDim / 8][4], const Scores<kTiles>& weights,
                                SmemAddress v, int first_key, int lane) {
  const int matrix = lane / 8;
  const int v_row = first_key + matrix % 2 * 8 + lane % 8;
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    const std::uint32_t rows[4] = {cuda::pack_pair<T>(weights[n][0], weights[n][1]),
                                   cuda::pack_pair<T>(weights[n][2], weights[n][3]),
                                   cuda::pack_pair<T>(weights[n + 1][0], weights[n + 1][1]),
                                   cuda::pack_pair<T>(weights[n + 1][2], weights[n + 1][3])};
#pragma unroll
    for (int d = 0; d < kDim / 8; d += 2) {
      std::uint32_t values[4];
      cuda::load_matrices_transposed(values, v + place_of<kDim>(n * 8 + v_row, d + matrix / 2));
      cuda::multiply_add<T>(out[d], rows, values[0], values[1]);
      cuda::multiply_add<T>(out[d + 1], rows, values[2], values[3]);
    }
  }
}

/// Products to logits in units of log2(e): scale, softcap, ALiBi, mask.
template <int kTiles>
__device__ void to_logits(const AttendParams& a, const RowMask& mask, int first_key, bool masked,
                          Scores<kTiles>& scores) {
  if (a.softcap > 0.0F) {
    const float factor = a.scale / a.softcap;
    const float cap = a.softcap * kLog2E;
#pragma unroll
    for (auto& score : scores) {
      for (float& value : score) value = cap * tanhf(value * factor);
    }
  } else {
    const float factor = a.scale * kLog2E;
#pragma unroll
    for (auto& score : scores) {
      for (float& value : score) value *= factor;
    }
  }
  if (a.alibi_slopes != nullptr) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      for (int e = 0; e < 4; ++e) {
        const int key = first_key + n * 8 + e % 2;
        scores[n][e] -= mask.slope[e / 2] * static_cast<float>(abs(mask.position[e / 2] - key));
      }
    }
  }
  if (masked) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      for (int e = 0; e < 4; ++e) {
        const int key = first_key + n * 8 + e % 2;
        if (key < mask.begin[e / 2] || key >= mask.end[e / 2]) scores[n][e] = -INFINITY;
      }
    }
  }
}

/// Over the four lanes that share a row.
__device__ inline float largest_of_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}
__device__ inline float sum_of_row(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

/// Logits to weights, with what was summed before scaled to the new largest. `sum` is the thread's
/// own keys' alone.
template <int kDim, int kTiles>
__device__ void weigh(Scores<kTiles>& scores, RowStats (&stats)[2], float (&out)[kDim / 8][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float max = stats[r].max;
#pragma unroll
    for (auto& score : scores) max = fmaxf(max, fmaxf(score[2 * r], score[2 * r + 1]));
    max = largest_of_row(max);
    const float base = max == -INFINITY ? 0.0F : max;  // a row that has seen nothing: weights 0
    const float shrink = cuda::fast_exp2(stats[r].max - base);
    float sum = stats[r].sum * shrink;
#pragma unroll
    for (auto& score : scores) {
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        score[e] = cuda::fast_exp2(score[e] - base);
        sum += score[e];
      }
    }
    stats[r] = {max, sum};
#pragma unroll
    for (auto& part : out) {
      part[2 * r] *= shrink;
      part[2 * r + 1] *= shrink;
    }
  }
}

}  // namespace octavo::kernels::flash2
