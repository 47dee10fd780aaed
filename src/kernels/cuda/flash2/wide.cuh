// SPDX-License-Identifier: Apache-2.0
// One item by one block, for heads whose sums of sixteen rows don't fit a warp's registers (V up to
// 512 dims).
//
// Scores are dealt to warps by rows and keys: warp w has sixteen rows, w % kRowTiles, and sixteen
// of the tile's keys, w / kRowTiles. Sums are dealt by the dims of V: each warp has all rows, so
// that every value is read from shared memory by one warp alone. In between, warps tell each other
// their largest logits, then the rounded weights and what the sums of each row shrink by. Three
// barriers a tile: keys are there; largest logits are; weights and values are.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/flash2/products.cuh"
#include "kernels/cuda/flash2/results.cuh"
#include "kernels/cuda/flash2/wide_loader.cuh"

namespace octavo::kernels::flash2 {

/// Where things lie in an item's shared memory.
template <typename ConfigT>
struct WideBuffers {
  static constexpr int kMaximaOffset =
      ConfigT::kExchangeOffset + ConfigT::kRows * ConfigT::kWeightPitch;
  static_assert(Results<ConfigT>::kOffset +
                    ConfigT::kRows * Results<ConfigT>::kPitch * sizeof(float) <=
                ConfigT::kExchangeOffset);

  unsigned char* smem;
  SmemAddress q;

  __device__ explicit WideBuffers(unsigned char* to) : smem(to), q(cuda::smem_address(to)) {}

  __device__ static int stage_of(int tile) { return tile & (ConfigT::kStages - 1); }
  [[nodiscard]] __device__ SmemAddress k(int tile) const {
    return q + ConfigT::kQueryBytes + stage_of(tile) * ConfigT::kKeyBytes;
  }
  [[nodiscard]] __device__ SmemAddress v(int tile) const {
    return q + ConfigT::kQueryBytes + ConfigT::kStages * ConfigT::kKeyBytes +
           stage_of(tile) * ConfigT::kValueBytes;
  }
  /// Two weights, of a row and the keys `key` and key + 1 of the tile.
  [[nodiscard]] __device__ std::uint32_t* weights(int row, int key) const {
    return reinterpret_cast<std::uint32_t*>(smem + ConfigT::kExchangeOffset +
                                            row * ConfigT::kWeightPitch + key * 2);
  }
  /// Of a row and a part of the keys: the largest logit, and at the end the sum of weights.
  [[nodiscard]] __device__ float& largest(int part, int row) const {
    return reinterpret_cast<float*>(smem + kMaximaOffset)[part * ConfigT::kRows + row];
  }
  /// What the sums of a row are to be multiplied with.
  [[nodiscard]] __device__ float& shrink(int row) const { return largest(ConfigT::kKeyParts, row); }
};

/// A warp's scores of a tile.
using WideScores = float[1][2][4];

/// Tells the largest logits of the part's keys.
template <typename ConfigT>
__device__ void tell_largest(const WideBuffers<ConfigT>& buffers, float factor, int part,
                             int first_row, int lane, const WideScores& scores) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto& [low, high] = scores[0];
    const float max = largest_of_row(
        fmaxf(fmaxf(low[2 * r], low[2 * r + 1]), fmaxf(high[2 * r], high[2 * r + 1])));
    if (lane % 4 == 0) buffers.largest(part, first_row + lane / 4 + 8 * r) = max * factor;
  }
}

/// Logits to weights; tells them, and what the sums of the rows shrink by. `stats` holds the sums
/// of the thread's own keys.
template <typename T, typename ConfigT>
__device__ void tell_weights(const WideBuffers<ConfigT>& buffers, float factor, int part,
                             int first_row, int lane, const WideScores& scores,
                             RowStats (&stats)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + lane / 4 + 8 * r;
    float max = stats[r].base;
#pragma unroll
    for (int other = 0; other < ConfigT::kKeyParts; ++other)
      max = fmaxf(max, buffers.largest(other, row));
    const float base = finite_base(max);
    const float shrink = cuda::fast_exp2(stats[r].base - base);
    float sum = stats[r].exact * shrink;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float low = cuda::fast_exp2(fmaf(scores[0][n][2 * r], factor, -base));
      const float high = cuda::fast_exp2(fmaf(scores[0][n][2 * r + 1], factor, -base));
      sum += low;
      sum += high;
      *buffers.weights(row, part * 16 + n * 8 + lane % 4 * 2) = cuda::pack_pair<T>(low, high);
    }
    stats[r] = {max, 0.0F, sum};
    if (part == 0 && lane % 4 == 0) buffers.shrink(row) = shrink;
  }
}

/// out = out * shrink + weights v, of the first kRowTiles tiles of rows and the warp's dims.
template <typename T, typename ConfigT, int kRowTiles>
__device__ void add_values(const WideBuffers<ConfigT>& buffers, SmemAddress v, int first_tile,
                           int lane, float (&out)[ConfigT::kRowTiles][ConfigT::kOutTiles][4]) {
  float shrink[kRowTiles][2];
  bool grown = false;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shrink[m][r] = buffers.shrink(m * kProductRows + lane / 4 + 8 * r);
      grown = grown || shrink[m][r] != 1.0F;
    }
  }
  // As long as no row's largest grows, which is most of a long sequence, all factors are 1.
  if (__any_sync(kAllLanes, grown)) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (auto& part : out[m]) {
        for (int e = 0; e < 4; ++e) part[e] *= shrink[m][e / 2];
      }
    }
  }
  constexpr int kPairs = ConfigT::kOutTiles / 2;
  const int matrix = lane / 8;
  const SmemAddress first_v =
      v + place_of<ValueRows<ConfigT>>(matrix % 2 * 8 + lane % 8, matrix / 2) + first_tile * 16;
  const SmemAddress first_weight =
      cuda::smem_address(buffers.weights(matrix % 2 * 8 + lane % 8, matrix / 2 * 8));
#pragma unroll
  for (int n = 0; n < ConfigT::kKeys / 16; ++n) {
    std::uint32_t rows[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      cuda::load_matrices(rows[m],
                          first_weight + m * kProductRows * ConfigT::kWeightPitch + n * 32);
    }
#pragma unroll
    for (int d = 0; d < kPairs; ++d) {
      std::uint32_t values[4];
      cuda::load_matrices_transposed(values,
                                     pairs_on(first_v, d) + n * 16 * ValueRows<ConfigT>::kRowBytes);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        cuda::multiply_add<T>(out[m][2 * d], rows[m], values[0], values[1]);
        cuda::multiply_add<T>(out[m][2 * d + 1], rows[m], values[2], values[3]);
      }
    }
  }
}

/// Sums and stats to where write_results finds them.
template <typename ConfigT>
__device__ void hand_over(const WideBuffers<ConfigT>& buffers, int num_rows, int part,
                          int first_row, int first_tile, const RowStats (&stats)[2],
                          const float (&out)[ConfigT::kRowTiles][ConfigT::kOutTiles][4]) {
  const int lane = lane_of_thread();
  const Results<ConfigT> results{buffers.smem};
  __syncthreads();  // all is read: the results take its place
  if (part < ConfigT::kKeyParts) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      const float sum = sum_of_row(stats[r].exact);
      if (lane % 4 == 0) {
        buffers.largest(part, row) = sum;
        if (part == 0) results.stats()[row].base = stats[r].base;
      }
    }
  }
#pragma unroll
  for (int m = 0; m < ConfigT::kRowTiles; ++m) {
    if (m * kProductRows >= num_rows) break;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* row = results.row(m * kProductRows + lane / 4 + 8 * r) + first_tile * 8 + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < ConfigT::kOutTiles; ++n)
        *reinterpret_cast<float2*>(row + n * 8) = {out[m][n][2 * r], out[m][n][2 * r + 1]};
    }
  }
  __syncthreads();
  for (int row = static_cast<int>(threadIdx.x); row < num_rows; row += ConfigT::kThreads) {
    float sum = 0.0F;
#pragma unroll
    for (int other = 0; other < ConfigT::kKeyParts; ++other) sum += buffers.largest(other, row);
    results.stats()[row].sum = sum;
    results.stats()[row].exact = sum;
  }
}

/// Copies come in the order K0 V0 K1 V1 …, each a group of its own. The keys of tile t + kStages
/// take their place once those of t are multiplied, the values of t + kStages - 1 theirs after the
/// barrier behind the products of t - 1. The loop begins kStages tiles early, so that the loads
/// stand in the code once.
template <typename T, typename ConfigT>
__device__ void attend_wide_item(const Work& w, const Frequencies& frequencies,
                                 BlockState<ConfigT>& state, unsigned char* smem) {
  constexpr int kStages = ConfigT::kStages;
  const Item& item = state.item;
  const WideBuffers<ConfigT> buffers(smem);
  const int warp = warp_of_thread();
  const int lane = lane_of_thread();
  const int part = warp / ConfigT::kRowTiles;
  const int first_row = warp % ConfigT::kRowTiles * kProductRows;
  const int num_rows = item.num_rows();
  const bool scores_keys = part < ConfigT::kKeyParts && first_row < num_rows;
  const int first_tile = warp * ConfigT::kOutTiles;
  const int end_tile = item.keys.end_tile;
  WideLoader<ConfigT> loader(w, item);
  load_queries<T, ConfigT>(w, frequencies, state, ConfigT::kRows, smem);
  float out[ConfigT::kRowTiles][ConfigT::kOutTiles][4] = {};
  RowStats stats[2] = {{-INFINITY}, {-INFINITY}};
#pragma unroll 1
  for (int tile = item.keys.first_tile - kStages; tile < end_tile; ++tile) {
    const bool is_here = tile >= item.keys.first_tile;
    const int next_values = tile + kStages - 1;
    if (is_here) {
      cuda::wait_copies<2 * kStages - 2>();
      __syncthreads();  // the keys are there, for all; the values before are no longer needed
    }
    if (next_values >= item.keys.first_tile && next_values < end_tile)
      loader.load_values(buffers.v(next_values));
    cuda::commit_copies();
    loader.look_up(tile + kStages);
    WideScores scores;
    if (is_here) {
      if (scores_keys) {
        multiply_keys<T, ConfigT>(scores, buffers.q, first_row, buffers.k(tile), part * 16, lane,
                                  [](int) {});
        const int first_key = tile * ConfigT::kKeys + part * 16;
        finish_logits(w, item, first_row, first_key, is_masked(item, first_key, 16), lane, scores);
        tell_largest(buffers, w.logit_factor, part, first_row, lane, scores);
      }
      __syncthreads();  // the largest logits are there; the keys are no longer needed
    }
    if (tile + kStages < end_tile) loader.load_keys(buffers.k(tile + kStages));
    cuda::commit_copies();
    if (!is_here) continue;
    if (scores_keys) tell_weights<T>(buffers, w.logit_factor, part, first_row, lane, scores, stats);
    cuda::wait_copies<2 * kStages - 1>();
    __syncthreads();  // weights and values are there
    const SmemAddress v = buffers.v(tile);
    if (num_rows <= kProductRows) {
      add_values<T, ConfigT, 1>(buffers, v, first_tile, lane, out);
    } else if (ConfigT::kRowTiles == 2 || num_rows <= 2 * kProductRows) {
      add_values<T, ConfigT, 2>(buffers, v, first_tile, lane, out);
    } else {
      add_values<T, ConfigT, ConfigT::kRowTiles>(buffers, v, first_tile, lane, out);
    }
  }
  cuda::wait_copies<0>();
  hand_over(buffers, num_rows, part, first_row, first_tile, stats, out);
}

}  // namespace octavo::kernels::flash2
