// SPDX-License-Identifier: Apache-2.0
// One item of a step by one block of four warps, sixteen rows a warp: online softmax over key tiles
// that come through a ring of buffers.
//
// Each tile of K and of V is a group of copies of its own, in the order K0 V0 K1 V1 …, so that
// with kStages tiles under way a wait for the next to be used leaves 2 kStages - 1 groups.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/flash2/finish.cuh"
#include "kernels/cuda/flash2/tile.cuh"

namespace octavo::kernels::flash2 {

inline constexpr int kKeyTiles = kTileKeys / 8;  ///< Products of 16 x 8 that a warp's scores are.

/// A thread's share of a warp's scores: elements 0, 1 of row lane / 4 and 2, 3 of the row 8 below,
/// at keys 8 n + 2 (lane % 4) + {0, 1} of the tile. Two rows a thread.
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

using Scores = float[kKeyTiles][4];

/// scores = q kᵀ of a warp's rows and a tile's keys.
template <typename T, int kDim>
__device__ void multiply_keys(Scores& scores, SmemAddress q, SmemAddress k, int warp, int lane) {
#pragma unroll
  for (auto& score : scores) {
    for (float& value : score) value = 0.0F;
  }
  const int matrix = lane / 8;
  const int q_row = warp * kWarpRows + matrix % 2 * 8 + lane % 8;
  const int k_row = matrix / 2 * 8 + lane % 8;
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    std::uint32_t rows[4];
    cuda::load_matrices(rows, q + place_of<kDim>(q_row, 2 * d + matrix / 2));
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      std::uint32_t keys[4];
      cuda::load_matrices(keys, k + place_of<kDim>(n * 8 + k_row, 2 * d + matrix % 2));
      cuda::multiply_add<T>(scores[n], rows, keys[0], keys[1]);
      cuda::multiply_add<T>(scores[n + 1], rows, keys[2], keys[3]);
    }
  }
}

/// out += weights v; the weights are rounded to T.
template <typename T, int kDim>
__device__ void multiply_values(float (&out)[kDim / 8][4], const Scores& weights, SmemAddress v,
                                int lane) {
  const int matrix = lane / 8;
  const int v_row = matrix % 2 * 8 + lane % 8;
#pragma unroll
  for (int n = 0; n < kKeyTiles; n += 2) {
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
__device__ inline void to_logits(const AttendParams& a, const RowMask& mask, int first_key,
                                 bool masked, Scores& scores) {
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
    for (int n = 0; n < kKeyTiles; ++n) {
      for (int e = 0; e < 4; ++e) {
        const int key = first_key + n * 8 + e % 2;
        scores[n][e] -= mask.slope[e / 2] * static_cast<float>(abs(mask.position[e / 2] - key));
      }
    }
  }
  if (masked) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
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
template <int kDim>
__device__ void weigh(Scores& scores, RowStats (&stats)[2], float (&out)[kDim / 8][4]) {
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

template <typename T, int kDim>
__device__ void write_row(const Work& w, const Item& item, const RowPlace& place, RowStats stats,
                          const float (&out)[kDim / 8][4], int r, int lane) {
  const AttendParams& a = w.attend;
  const int first = 2 * (lane % 4);
  if (item.num_splits > 1) {
    const std::int64_t row =
        w.cut.partial_offsets[item.b] + std::int64_t{place.token} * item.num_splits + item.split;
    const std::int64_t at = row * a.num_q_heads + place.head;
    if (lane % 4 == 0) w.stats[at] = stats;
    if (stats.sum == 0.0F) return;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<float2*>(w.partials + at * kDim + n * 8 + first) = {out[n][2 * r],
                                                                            out[n][2 * r + 1]};
    }
    return;
  }
  if (lane % 4 == 0) write_lse(a, item.b, place.token, place.head, stats);
  const float factor = factor_of(a, place.head, stats);
  const std::int64_t to = cuda::token_offset(a.out_layout, a.batch, item.b, place.token) +
                          place.head * a.out_layout.head_stride + first;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    if (n * 8 >= a.head_dim_v) break;
    const float low = out[n][2 * r] * factor;
    const float high = out[n][2 * r + 1] * factor;
    if (w.out_in_pairs) {
      *reinterpret_cast<std::uint32_t*>(static_cast<T*>(a.out) + to + n * 8) =
          cuda::pack_pair<T>(low, high);
    } else {
      cuda::store_element(a.out, a.out_dtype, to + n * 8, low);
      cuda::store_element(a.out, a.out_dtype, to + n * 8 + 1, high);
    }
  }
}

template <typename T, int kDim>
__device__ void attend_block(const Work& w, const Frequencies& frequencies, unsigned char* smem) {
  using Shape = TileShape<kDim>;
  constexpr int kStages = Shape::kStages;
  const Item item = item_of_block(w);
  if (item.num_tokens == 0) return;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;

  const SmemAddress q = cuda::smem_address(smem);
  const auto k_of = [&](int stage) { return q + (1 + stage) * Shape::kBytes; };
  const auto v_of = [&](int stage) { return q + (1 + kStages + stage) * Shape::kBytes; };

  KeyLoader<kDim> loader(w, item);
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    loader.look_up(item.first_tile + s);
    if (item.first_tile + s < item.end_tile) loader.load_keys(k_of(s));
    cuda::commit_copies();
    if (item.first_tile + s < item.end_tile) loader.load_values(v_of(s));
    cuda::commit_copies();
  }
  load_queries<T, kDim>(w, frequencies, item, smem);
  loader.look_up(item.first_tile + kStages);

  const int first_row = warp * kWarpRows + lane / 4;
  const bool has_rows = warp * kWarpRows < item.num_rows();
  const RowMask mask = row_mask(w, item, first_row);
  // Tiles between these are seen whole by every row.
  const std::int64_t last_position = item.first_position + item.num_tokens - 1;
  const KeyRange whole{visible_keys(w.attend.causal, w.attend.window_left, w.attend.window_right,
                                    last_position, item.kv_len)
                           .begin,
                       visible_keys(w.attend.causal, w.attend.window_left, w.attend.window_right,
                                    item.first_position, item.kv_len)
                           .end};

  float out[kDim / 8][4] = {};
  RowStats stats[2] = {{-INFINITY, 0.0F}, {-INFINITY, 0.0F}};
  int stage = 0;
#pragma unroll 1
  for (int tile = item.first_tile; tile < item.end_tile; ++tile) {
    const bool more = tile + kStages < item.end_tile;
    Scores scores;
    cuda::wait_copies<2 * kStages - 1>();
    __syncthreads();
    if (has_rows) multiply_keys<T, kDim>(scores, q, k_of(stage), warp, lane);
    __syncthreads();
    if (more) loader.load_keys(k_of(stage));
    cuda::commit_copies();
    if (has_rows) {
      const int first_key = tile * kTileKeys;
      const bool masked = first_key < whole.begin || first_key + kTileKeys > whole.end;
      to_logits(w.attend, mask, first_key + 2 * (lane % 4), masked, scores);
      weigh<kDim>(scores, stats, out);
    }
    cuda::wait_copies<2 * kStages - 1>();
    __syncthreads();
    if (has_rows) multiply_values<T, kDim>(out, scores, v_of(stage), lane);
    __syncthreads();
    if (more) loader.load_values(v_of(stage));
    cuda::commit_copies();
    loader.look_up(tile + kStages + 1);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  cuda::wait_copies<0>();

  if (!has_rows) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    stats[r].sum = sum_of_row(stats[r].sum);
    const RowPlace place = place_of_row(item, first_row + 8 * r);
    if (place.exists) write_row<T, kDim>(w, item, place, stats[r], out, r, lane);
  }
}

}  // namespace octavo::kernels::flash2
