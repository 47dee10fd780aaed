// SPDX-License-Identifier: Apache-2.0
// One item by one block, for heads whose sums of sixteen rows don't fit a warp's registers (V up to
// 512 dims).
//
// Two warps have sixteen rows of the scores: each multiplies half of the dims with all keys of the
// tile, and adds both halves for half of the keys (fewer loads from shared memory than by all dims
// and half of the keys). Sums are dealt by the dims of V: each warp has all rows, so that every
// value is read from shared memory by one warp alone. In between, warps tell each other their
// largest logits, then the rounded weights and what the sums of each row shrink by. The scores of a
// tile are multiplied together with the values of the tile before: loads from shared memory bound
// the ones, products the others. Two barriers of the block a tile: what is to be multiplied is
// there; largest logits are, and all is multiplied.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/flash2/products.cuh"
#include "kernels/cuda/flash2/results.cuh"
#include "kernels/cuda/flash2/wide_products.cuh"

namespace octavo::kernels::flash2 {

/// Tells the largest logits of the part's keys.
template <typename ConfigT>
__device__ void tell_largest(const WideBuffers<ConfigT>& buffers, float factor, int part,
                             int first_row, int lane, const WideScores<ConfigT>& scores) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float max = -INFINITY;
#pragma unroll
    for (const auto& score : scores[0]) max = fmaxf(max, fmaxf(score[2 * r], score[2 * r + 1]));
    max = largest_of_row(max);
    if (lane % 4 == 0) buffers.largest(part, first_row + lane / 4 + 8 * r) = max * factor;
  }
}

/// Logits to weights; tells them, and what the sums of the rows shrink by. `stats` holds the sums
/// of the thread's own keys.
template <typename T, typename ConfigT>
__device__ void tell_weights(const WideBuffers<ConfigT>& buffers, float factor, int part,
                             int first_row, int lane, const WideScores<ConfigT>& scores,
                             RowStats (&stats)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + lane / 4 + 8 * r;
    float max = stats[r].max;
#pragma unroll
    for (int other = 0; other < ConfigT::kParts; ++other)
      max = fmaxf(max, buffers.largest(other, row));
    const float base = max == -INFINITY ? 0.0F : max;  // has seen nothing: weights 0
    const float shrink = cuda::fast_exp2(stats[r].max - base);
    float sum = stats[r].sum * shrink;
#pragma unroll
    for (int n = 0; n < ConfigT::kPartKeys / 8; ++n) {
      const float low = cuda::fast_exp2(fmaf(scores[0][n][2 * r], factor, -base));
      const float high = cuda::fast_exp2(fmaf(scores[0][n][2 * r + 1], factor, -base));
      sum += low;
      sum += high;
      *buffers.weights(row, part * ConfigT::kPartKeys + n * 8 + lane % 4 * 2) =
          cuda::pack_pair<T>(low, high);
    }
    stats[r] = {max, sum};
    if (part == 0 && lane % 4 == 0) buffers.shrink(row) = shrink;
  }
}

/// Sums and stats to where write_results finds them.
template <typename ConfigT>
__device__ void hand_over(const WideBuffers<ConfigT>& buffers, int num_rows, int part,
                          int first_row, int first_tile, const RowStats (&stats)[2],
                          const float (&out)[ConfigT::kRowTiles][ConfigT::kOutTiles][4]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const Results<ConfigT> results{buffers.smem};
  __syncthreads();  // all is read: the results take its place
  if (part < ConfigT::kParts) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      const float sum = sum_of_row(stats[r].sum);
      if (lane % 4 == 0) {
        buffers.largest(part, row) = sum;
        if (part == 0) results.stats()[row].max = stats[r].max;
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
    for (int other = 0; other < ConfigT::kParts; ++other) sum += buffers.largest(other, row);
    results.stats()[row].sum = sum;
  }
}

/// Behind the products of tile t - 1's values and tile t's scores come the copies of tile
/// t + kStages - 1's values and tile t + kStages's keys, to where those were; one group. The loop
/// begins early, so that the loads stand in the code once.
template <typename T, typename ConfigT>
__device__ void attend_wide_item(const Work& w, const Frequencies& frequencies,
                                 BlockState<ConfigT>& state, unsigned char* smem) {
  constexpr int kStages = ConfigT::kStages;
  const Item& item = state.item;
  const WideBuffers<ConfigT> buffers(smem);
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int part = warp / ConfigT::kRowTiles;
  const int first_row = warp % ConfigT::kRowTiles * kProductRows;
  const int num_rows = item.num_rows();
  const bool has_scores = part < ConfigT::kParts && first_row < num_rows;
  const int first_tile = warp * ConfigT::kOutTiles;
  const int begin_tile = item.keys.first_tile;
  const int end_tile = item.keys.end_tile;
  const WideLoader<ConfigT> loader(w, item);
  FoundKey of_values;
  FoundKey of_keys = loader.look_up(begin_tile);
  load_queries<T, ConfigT>(w, frequencies, state, ConfigT::kRows, smem);
  const LogitRule rule = logit_rule(w.attend);
  float out[ConfigT::kRowTiles][ConfigT::kOutTiles][4] = {};
  RowStats stats[2] = {{-INFINITY, 0.0F}, {-INFINITY, 0.0F}};
#pragma unroll 1
  for (int tile = begin_tile - kStages; tile <= end_tile; ++tile) {
    const bool is_here = tile >= begin_tile;
    const bool scores_keys = is_here && has_scores && tile < end_tile;
    WideScores<ConfigT> scores;
    if (is_here) {
      cuda::wait_copies<kStages - 1>();
      __syncthreads();  // keys, values and weights are there
      const WideStep<ConfigT> step{buffers.k(tile), buffers.v(tile - 1), scores_keys, part,
                                   first_row,       first_tile};
      WideProducts<ConfigT> products;
      if (tile == begin_tile) {
        multiply<T, ConfigT, 0>(buffers, step, products, out);
      } else if (ConfigT::kRowTiles == 1 || num_rows <= kProductRows) {
        multiply<T, ConfigT, 1>(buffers, step, products, out);
      } else if (ConfigT::kRowTiles == 2 || num_rows <= 2 * kProductRows) {
        multiply<T, ConfigT, (ConfigT::kRowTiles > 2 ? 2 : ConfigT::kRowTiles)>(buffers, step,
                                                                                products, out);
      } else {
        multiply<T, ConfigT, ConfigT::kRowTiles>(buffers, step, products, out);
      }
      if (scores_keys) {
        add_mates(buffers, part, first_row, lane, products, scores);
        finish_logits(w, item, rule, first_row, tile * ConfigT::kKeys + part * ConfigT::kPartKeys,
                      lane, scores);
        tell_largest(buffers, rule.factor, part, first_row, lane, scores);
      }
      __syncthreads();  // the largest logits are there; all is multiplied
    }
    const int values_tile = tile + kStages - 1;
    if (values_tile >= begin_tile && values_tile < end_tile)
      loader.load_values(of_values, buffers.v(values_tile));
    if (tile + kStages < end_tile) loader.load_keys(of_keys, buffers.k(tile + kStages));
    cuda::commit_copies();
    of_values = of_keys;
    of_keys = loader.look_up(tile + kStages + 1);
    if (scores_keys) tell_weights<T>(buffers, rule.factor, part, first_row, lane, scores, stats);
  }
  cuda::wait_copies<0>();
  hand_over(buffers, num_rows, part, first_row, first_tile, stats, out);
}

}  // namespace octavo::kernels::flash2
