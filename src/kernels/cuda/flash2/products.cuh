// SPDX-License-Identifier: Apache-2.0
// What a warp does with some rows of q, sixteen to a product, and some keys in shared memory:
// scores, logits, weights, and the weighted sum of values, all in registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/flash2/finish.cuh"
#include "kernels/cuda/flash2/pieces.cuh"
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

__device__ inline RowMask row_mask(const Work& w, const Item& item, int first_row) {
  const AttendParams& a = w.attend;
  RowMask mask;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowPlace place = place_of_row(w, item, first_row + 8 * r);
    if (!place.exists) continue;
    const std::int32_t position = item.first_position + place.token - item.first_token;
    mask.begin[r] = w.shape.reach.begin(position);
    mask.end[r] = w.shape.reach.end(position, item.kv_len);
    mask.position[r] = position;
    if (a.alibi_slopes != nullptr) mask.slope[r] = a.alibi_slopes[place.head] * kLog2E;
  }
  return mask;
}

/// The softmax of a thread's two rows so far. Outputs are divided by the sum of the weights as they
/// were rounded for the product with V, so that the rounding of a weight that outweighs all others
/// cancels: that sum is a product with a column of ones, and the accumulators of zeros beside it
/// have room for what the thread adds itself.
struct SoftRows {
  float base[2] = {-INFINITY, -INFINITY};
  float sums[4] = {};  ///< Of row r: [2 r] of all rounded weights, [2 r + 1] of own exact ones.
};
/// The right operand of that product: ones in the even columns, zeros in the odd ones.
template <typename T>
__device__ std::uint32_t ones_beside_zeros(int lane) {
  return lane / 4 % 2 == 0 ? cuda::pack_pair<T>(1.0F, 1.0F) : 0U;
}

/// Of kTiles products of 16 rows x 8 keys.
template <int kTiles>
using Scores = float[kTiles][4];

/// scores = q kᵀ of 16 kRowTiles rows from first_row on, and the keys from first_key on. Fragments
/// are read a product ahead. `between` is called with the number of each step over dims.
template <typename T, typename ConfigT, int kRowTiles, int kTiles, typename CallT>
__device__ void multiply_keys(float (&scores)[kRowTiles][kTiles][4], SmemAddress q, int first_row,
                              SmemAddress k, int first_key, int lane, const CallT& between) {
  constexpr int kSteps = ConfigT::kDim / 16;
  constexpr int kPairs = kTiles / 2;
#pragma unroll
  for (auto& rows : scores) {
    for (auto& score : rows) {
      for (float& value : score) value = 0.0F;
    }
  }
  const int matrix = lane / 8;
  const SmemAddress first_q =
      q + place_of<ConfigT>(first_row + matrix % 2 * 8 + lane % 8, matrix / 2);
  const SmemAddress first_k =
      k + place_of<ConfigT>(first_key + matrix / 2 * 8 + lane % 8, matrix % 2);
  std::uint32_t rows[2][kRowTiles][4];
  std::uint32_t keys[2][4];
  const auto load_rows = [&](int d) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
      cuda::load_matrices(rows[d % 2][m], pairs_on(first_q, d) + m * 16 * ConfigT::kRowBytes);
  };
  const auto load_keys = [&](int i) {
    cuda::load_matrices(keys[i % 2],
                        pairs_on(first_k, i / kPairs) + i % kPairs * 16 * ConfigT::kRowBytes);
  };
  load_rows(0);
  load_keys(0);
#pragma unroll
  for (int d = 0; d < kSteps; ++d) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int i = d * kPairs + n;
      if (i + 1 < kSteps * kPairs) load_keys(i + 1);
      if (n == 0 && d + 1 < kSteps) load_rows(d + 1);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        cuda::multiply_add<T>(scores[m][2 * n], rows[d % 2][m], keys[i % 2][0], keys[i % 2][1]);
        cuda::multiply_add<T>(scores[m][2 * n + 1], rows[d % 2][m], keys[i % 2][2], keys[i % 2][3]);
      }
    }
    between(d);
  }
}

/// out += weights v of the keys from first_key on, and of dims 8 first_tile …, a multiple of 64.
/// The weights, 2^(logit factor - base), are rounded to T. With 128 dims those of sixteen keys are
/// made between the products of the sixteen before. kSumsExactly: the LSE needs their sums before
/// rounding too, which cost 4 % (64 dims). `between` is called with the number of each step.
template <typename T, typename ConfigT, bool kSumsExactly, int kRowTiles, int kTiles, int kOutTiles,
          typename CallT>
__device__ void multiply_values(float (&out)[kRowTiles][kOutTiles][4], SoftRows (&soft)[kRowTiles],
                                float (&logits)[kRowTiles][kTiles][4], float factor, SmemAddress v,
                                int first_key, int first_tile, int lane, const CallT& between) {
  constexpr int kPairs = kOutTiles / 2;
  constexpr int kSteps = kTiles / 2 * kPairs;
  constexpr int kWeights = 8 * kRowTiles;  // of a thread and sixteen keys
  constexpr int kFirstSteps = ConfigT::kDim == 128 ? 1 : kTiles / 2;  // that are made beforehand
  constexpr int kEach = (kWeights + kPairs - 1) / kPairs;             // beside two tiles of values
  const int matrix = lane / 8;
  const SmemAddress first_v =
      v + place_of<ConfigT>(first_key + matrix % 2 * 8 + lane % 8, matrix / 2) + first_tile * 16;
  const std::uint32_t ones = ones_beside_zeros<T>(lane);
  std::uint32_t values[2][4];
  const auto load_values = [&](int i) {
    cuda::load_matrices_transposed(
        values[i % 2], pairs_on(first_v, i % kPairs) + i / kPairs * 16 * ConfigT::kRowBytes);
  };
  const auto make_weight = [&](int n, int i) {
    SoftRows& rows = soft[i / 8];
    float& value = logits[i / 8][2 * n + i % 8 / 4][i % 4];
    const int r = i % 4 / 2;
    value = cuda::fast_exp2(fmaf(value, factor, -finite_base(rows.base[r])));
    if constexpr (kSumsExactly) rows.sums[2 * r + 1] += value;
  };
  load_values(0);
#pragma unroll
  for (int i = 0; i < kFirstSteps * kWeights; ++i) make_weight(i / kWeights, i % kWeights);
#pragma unroll
  for (int n = 0; n < kTiles / 2; ++n) {
    std::uint32_t rows[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float(&from)[4] = logits[m][2 * n + r / 2];
        rows[m][r] = cuda::pack_pair<T>(from[r % 2 * 2], from[r % 2 * 2 + 1]);
      }
      cuda::multiply_add<T>(soft[m].sums, rows[m], ones, ones);
    }
#pragma unroll
    for (int d = 0; d < kPairs; ++d) {
      const int i = n * kPairs + d;
      if (i + 1 < kSteps) load_values(i + 1);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        cuda::multiply_add<T>(out[m][2 * d], rows[m], values[i % 2][0], values[i % 2][1]);
        cuda::multiply_add<T>(out[m][2 * d + 1], rows[m], values[i % 2][2], values[i % 2][3]);
      }
      between(i);
      if (n + kFirstSteps >= kTiles / 2) continue;
#pragma unroll
      for (int x = d * kEach; x < d * kEach + kEach && x < kWeights; ++x) make_weight(n + 1, x);
    }
  }
}

/// Products to logits in units of log2(e), softcap and ALiBi in them.
template <int kTiles>
__device__ void to_logits(const Work& w, const RowMask& mask, int first_key,
                          Scores<kTiles>& scores) {
  const AttendParams& a = w.attend;
  if (a.softcap > 0.0F) {
    const float factor = w.cap_factor;
    const float cap = a.softcap * kLog2E;
#pragma unroll
    for (auto& score : scores) {
      // tanh x = 1 - 2 / (e^2x + 1): its error is absolute, which is what counts in a logit.
      for (float& value : score)
        value = cap - __fdividef(2.0F * cap, cuda::fast_exp2(value * factor) + 1.0F);
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
}

template <int kTiles>
__device__ void mask_keys(const RowMask& mask, int first_key, Scores<kTiles>& scores) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    for (int e = 0; e < 4; ++e) {
      const int key = first_key + n * 8 + e % 2;
      if (key < mask.begin[e / 2] || key >= mask.end[e / 2]) scores[n][e] = -INFINITY;
    }
  }
}

/// Products of 16 kRowTiles rows from first_row on with the keys from first_key on, to logits in
/// units of log2(e) / logit_factor: softcap and ALiBi, and, where `masked`, without keys that a row
/// doesn't see.
template <int kRowTiles, int kTiles>
__device__ void finish_logits(const Work& w, const Item& item, int first_row, int first_key,
                              bool masked, int lane, float (&scores)[kRowTiles][kTiles][4]) {
  if (!masked && w.plain_logits) return;
  const int own_key = first_key + 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const RowMask mask = row_mask(w, item, first_row + m * kProductRows + lane / 4);
    if (!w.plain_logits) to_logits<kTiles>(w, mask, own_key, scores[m]);
    if (masked) mask_keys<kTiles>(mask, own_key, scores[m]);
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

/// The largest of a thread's own logits in a row.
template <int kTiles>
__device__ float own_largest(const Scores<kTiles>& scores, int r) {
  float max = scores[0][2 * r];
#pragma unroll
  for (const auto& score : scores) max = fmaxf(max, fmaxf(score[2 * r], score[2 * r + 1]));
  return max;
}

/// A row's stats, from all four lanes that share it.
__device__ inline RowStats stats_of_row(const SoftRows& soft, int r) {
  return {soft.base[r], soft.sums[2 * r], sum_of_row(soft.sums[2 * r + 1])};
}

/// How far a row's logits may outgrow its base, in units of log2(e). In an item's first tiles not
/// at all: the weight of the largest logit is then 1, which needs no rounding. Where there are few
/// keys the rounding of a single weight would be seen in the result.
__device__ inline float slack_in(int tile, int first_tile) {
  constexpr int kExactTiles = 4;
  return tile < first_tile + kExactTiles ? 0.0F : 8.0F;
}

/// Moves bases to the largest logits where some row of the warp has one that outgrows its base by
/// more than `slack` (as in FlashAttention-4), which is seldom behind the first tiles. Whether a
/// row's base moves follows from its own logits alone.
template <int kRowTiles, int kTiles, int kOutTiles>
__device__ void follow_largest(float factor, float slack,
                               const float (&logits)[kRowTiles][kTiles][4],
                               SoftRows (&soft)[kRowTiles], float (&out)[kRowTiles][kOutTiles][4]) {
  float own[kRowTiles][2];
  bool outgrown = false;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      own[m][r] = own_largest<kTiles>(logits[m], r) * factor;
      outgrown = outgrown || own[m][r] > soft[m].base[r] + slack;
    }
  }
  if (!__any_sync(kAllLanes, outgrown)) return;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = largest_of_row(own[m][r]);
      const bool grows = largest > soft[m].base[r] + slack;
      const float shrink = grows ? cuda::fast_exp2(soft[m].base[r] - largest) : 1.0F;
      if (grows) soft[m].base[r] = largest;
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        soft[m].sums[e] *= shrink;
#pragma unroll
        for (auto& part : out[m]) part[e] *= shrink;
      }
    }
  }
}

}  // namespace octavo::kernels::flash2
