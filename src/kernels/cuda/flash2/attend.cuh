// SPDX-License-Identifier: Apache-2.0
// One item by one block: online softmax over key tiles that come through a ring of buffers.
//
// Instances for few rows (up to 32), and items of up to 16 rows in the others, deal the keys: of
// each tile a group of warps looks at the sixteen that it brought itself, so that groups need not
// wait for each other before the end, when their sums are added in order. With more rows these are
// dealt to the warps, and every warp looks at all keys: here all at the same tile, in drift.cuh
// each at its own.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/flash2/drift.cuh"
#include "kernels/cuda/flash2/parts.cuh"
#include "kernels/cuda/flash2/pieces.cuh"
#include "kernels/cuda/flash2/products.cuh"
#include "kernels/cuda/flash2/results.cuh"
#include "kernels/cuda/flash2/rows.cuh"
#include "kernels/cuda/flash2/wide.cuh"

namespace octavo::kernels::flash2 {

template <int kStages>
__device__ int next_stage(int stage) {
  return stage + 1 == kStages ? 0 : stage + 1;
}

/// Whether the results are written, which they are where they go to the output 16 bytes at a time.
template <typename T, typename ConfigT, int kRowTiles>
__device__ bool attend_dealt_rows(const Work& w, const Frequencies& frequencies,
                                  BlockState<ConfigT>& state, unsigned char* smem) {
  const Item& item = state.item;
  constexpr int kScoreKeys = ConfigT::kScoreKeys;
  constexpr int kTiles = kScoreKeys / 8;
  /// Copies between the products cost registers.
  constexpr bool kSpreads = kScoreKeys == ConfigT::kKeys;
  constexpr bool kAlwaysExact = ConfigT::kDim > 128;  // the compiler's order is 2 % faster so
  constexpr int kAhead = ConfigT::kStages - 1;        // tiles on their way while one is worked on
  constexpr int kWarpRows = kRowTiles * kProductRows;
  const Buffers<ConfigT> buffers{cuda::smem_address(smem)};
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kLanes;
  const int lane = thread % kLanes;
  const int first_row = warp * kWarpRows;
  const bool has_rows = first_row < item.num_rows();
  const int end_tile = item.keys.end_tile;
  KeyLoader<ConfigT> loader(w);
  loader.look_up(key_places(item), item.keys.first_tile);
  if (copies_queries(w)) {
    copy_own_queries<T, ConfigT, kWarpRows>(w, item, first_row, buffers.q);
  } else {
    load_any_queries<T, ConfigT>(w, frequencies, state, ConfigT::kWarps * kWarpRows, smem);
    __syncthreads();  // other warps wrote to the rows that results will go through
  }
  // In shared memory: there are no registers to spare.
  find_span<kWarpRows>(w, item, first_row, state.spans[warp]);
  float out[kRowTiles][ConfigT::kDim / 8][4] = {};
  SoftRows soft[kRowTiles];
  int stage = 1;  // of the tile; the one that is loaded takes the place of the tile before
#pragma unroll 1
  for (int tile = item.keys.first_tile - kAhead; tile < end_tile; ++tile) {
    const bool is_here = tile >= item.keys.first_tile;
    const KeyPlaces places = key_places(item);
    unsigned sights =
        sights_of<kScoreKeys, ConfigT::kKeys>(state.spans[warp], tile * ConfigT::kKeys);
    if (is_here) {
      cuda::wait_copies<kAhead - 1>();
      __syncthreads();  // the tile is there, for all; and the one before is no longer needed
    }
    const int to = stage == 0 ? ConfigT::kStages - 1 : stage - 1;
    const bool loads = tile + kAhead < end_tile;
    const bool works = is_here && has_rows && (sights & kSeesAny) != 0;
    SpreadCopies copies{};
    if constexpr (kSpreads) {
      copies = loader.spread(places, buffers.k(to), buffers.v(to));
      copies.wanted = copies.wanted && loads && works;
    }
    if (loads && !copies.wanted) loader.load_tile(places, buffers.k(to), buffers.v(to));
    if constexpr (!kSpreads) cuda::commit_copies();
    loader.look_up(places, tile + kAhead + 1);
    if (works) {
#pragma unroll 1
      for (int first = 0; first < ConfigT::kKeys; first += kScoreKeys, sights >>= 1U) {
        if ((sights & 1U) == 0) continue;
        float scores[kRowTiles][kTiles][4];
        multiply_keys<T, ConfigT>(scores, buffers.q, first_row, buffers.k(stage), first, lane,
                                  [&](int step) {
                                    if constexpr (kSpreads) {
                                      loader.copy_keys(copies, step);
                                      loader.copy_values(copies, step);
                                    }
                                  });
        if constexpr (kSpreads) cuda::commit_copies();
        finish_logits(w, item, first_row, tile * ConfigT::kKeys + first, (sights & kMasked) != 0,
                      lane, scores);
        follow_largest(w.logit_factor, slack_in(tile, item.keys.first_tile), scores, soft, out);
        const SmemAddress v = buffers.v(stage);
        if (kAlwaysExact || w.attend.lse != nullptr) {
          multiply_values<T, ConfigT, true>(out, soft, scores, w.logit_factor, v, first, 0, lane,
                                            [](int) {});
        } else {
          multiply_values<T, ConfigT, false>(out, soft, scores, w.logit_factor, v, first, 0, lane,
                                             [](int) {});
        }
      }
    } else if constexpr (kSpreads) {
      cuda::commit_copies();
    }
    stage = next_stage<ConfigT::kStages>(stage);
  }
  cuda::wait_copies<0>();
  return finish_own_rows<T, ConfigT>(w, item, first_row, lane, smem, soft, out);
}

/// Adds the sums that the groups of warps have of the same rows; each warp does it for some of the
/// dims. To the results, or to the partial results where a piece is shared and the instance for few
/// rows.
template <typename ConfigT>
__device__ void add_groups(const Work& w, const Item& item, const SoftRows& soft,
                           const float (&out)[ConfigT::kDim / 8 / ConfigT::kDimParts][4],
                           int first_row, unsigned char* smem) {
  constexpr int kTiles = ConfigT::kDim / 8;
  constexpr int kPartTiles = kTiles / ConfigT::kDimParts;
  constexpr int kOwnTiles = kTiles / ConfigT::kWarps;
  static_assert(Results<ConfigT>::kSumsOffset +
                    ConfigT::kKeyGroups * kTiles * 4 * kLanes * sizeof(float) <=
                ConfigT::kSmemBytes);
  const Results<ConfigT> results{smem};
  const int warp = warp_of_thread();
  const int lane = lane_of_thread();
  const int group = warp / ConfigT::kDimParts;
  const int first_tile = warp % ConfigT::kDimParts * kPartTiles;
  auto* all_stats = reinterpret_cast<RowStats*>(smem);  // [groups, 2, lanes]
  auto* all_out =
      reinterpret_cast<float4*>(smem + Results<ConfigT>::kSumsOffset);  // [groups, tiles, lanes]
  static_assert(ConfigT::kKeyGroups * 2 * kLanes * sizeof(RowStats) <=
                Results<ConfigT>::kStatsOffset);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowStats stats = stats_of_row(soft, r);
    if (first_tile == 0) all_stats[(group * 2 + r) * kLanes + lane] = stats;
  }
#pragma unroll
  for (int n = 0; n < kPartTiles; ++n) {
    all_out[(group * kTiles + first_tile + n) * kLanes + lane] = {out[n][0], out[n][1], out[n][2],
                                                                  out[n][3]};
  }
  __syncthreads();
  // Eight rows are all that many steps have, and code is slow the first time.
#pragma unroll(ConfigT::kFew ? 1 : 2)
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + 8 * r + lane / 4;
    if (ConfigT::kFew && row >= item.num_rows()) break;
    float max = -INFINITY;
#pragma unroll
    for (int from = 0; from < ConfigT::kKeyGroups; ++from)
      max = fmaxf(max, all_stats[(from * 2 + r) * kLanes + lane].base);
    RowStats sums{max};
    const float base = finite_base(max);
    float own[kOwnTiles][2] = {};
#pragma unroll
    for (int from = 0; from < ConfigT::kKeyGroups; ++from) {
      const RowStats part = all_stats[(from * 2 + r) * kLanes + lane];
      const float share = cuda::fast_exp2(part.base - base);
      add_stats(sums, part, share);
#pragma unroll
      for (int n = 0; n < kOwnTiles; ++n) {
        const int tile = from * kTiles + warp * kOwnTiles + n;
        const auto* pairs = reinterpret_cast<const float2*>(all_out + tile * kLanes + lane);
        own[n][0] += pairs[r].x * share;
        own[n][1] += pairs[r].y * share;
      }
    }
    float* to = results.row(row);
    RowStats* stats_to = results.stats() + row;
    if constexpr (ConfigT::kFew) {
      if (item.sharing.num_parts > 1) {
        const std::int64_t place = item.partial_base + row;
        to = w.partials + place * ConfigT::kDimV;
        stats_to = w.stats + place;
      }
    }
    if (warp == 0 && lane % 4 == 0) *stats_to = sums;
    to += warp * kOwnTiles * 8 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n)
      *reinterpret_cast<float2*>(to + n * 8) = {own[n][0], own[n][1]};
  }
}

/// Waits for the warps of the own group.
template <typename ConfigT>
__device__ void sync_group(int group) {
  if constexpr (ConfigT::kDimParts == 1) {
    __syncwarp();
  } else {
    cuda::sync_some(1 + group, ConfigT::kDimParts * kLanes);
  }
}

/// Each tile of K and of V is a group of copies of its own, in the order K0 V0 K1 V1 …, so that
/// with kStages tiles under way a wait for the next to be used leaves 2 kStages - 1 groups. The
/// loop begins kStages tiles early, so that the loads stand in the code once. Returns whether the
/// results are written, as add_groups does with parts of shared pieces.
template <typename T, typename ConfigT, int kRowTiles>
__device__ bool attend_dealt_keys(const Work& w, const Frequencies& frequencies,
                                  BlockState<ConfigT>& state, unsigned char* smem) {
  const Item& item = state.item;
  constexpr int kPending = 2 * ConfigT::kStages - 1;
  constexpr int kPendingFirst = kPending - 1;  // q comes with the values of the first tile
  constexpr int kGroupKeys = 16;
  constexpr int kPartTiles = ConfigT::kDim / 8 / ConfigT::kDimParts;
  const Buffers<ConfigT> buffers{cuda::smem_address(smem)};
  const int warp = warp_of_thread();
  const int lane = lane_of_thread();
  const int group = warp / ConfigT::kDimParts;
  const int first_tile = warp % ConfigT::kDimParts * kPartTiles;
  const int first_key = group * kGroupKeys;
  const int end_tile = item.keys.end_tile;
  KeyLoader<ConfigT> loader(w);
  loader.look_up(key_places(item), item.keys.first_tile);
  float out[kRowTiles][kPartTiles][4] = {};
  SoftRows soft[kRowTiles];
  int stage = 0;
#pragma unroll 1
  for (int tile = item.keys.first_tile - ConfigT::kStages; tile < end_tile; ++tile) {
    const bool is_here = tile >= item.keys.first_tile;
    const bool loads = tile + ConfigT::kStages < end_tile;
    const KeyPlaces places = key_places(item);
    float scores[kRowTiles][kGroupKeys / 8][4];
    if (is_here) {
      if (tile == item.keys.first_tile) {
        cuda::wait_copies<kPendingFirst>();
        __syncthreads();  // q is there, of all
      } else {
        cuda::wait_copies<kPending>();
        sync_group<ConfigT>(group);
      }
      multiply_keys<T, ConfigT>(scores, buffers.q, 0, buffers.k(stage), first_key, lane,
                                [](int) {});
      sync_group<ConfigT>(group);
    }
    if (loads) loader.load_keys(places, buffers.k(stage));
    cuda::commit_copies();
    if (is_here) {
      const int key = tile * ConfigT::kKeys + first_key;
      finish_logits(w, item, 0, key, is_masked(item, key, kGroupKeys), lane, scores);
      follow_largest(w.logit_factor, slack_in(tile, item.keys.first_tile), scores, soft, out);
      cuda::wait_copies<kPending>();
      sync_group<ConfigT>(group);
      multiply_values<T, ConfigT, true>(out, soft, scores, w.logit_factor, buffers.v(stage),
                                        first_key, first_tile, lane, [](int) {});
      sync_group<ConfigT>(group);
    }
    if (loads) loader.load_values(places, buffers.v(stage));
    if (tile == item.keys.first_tile - ConfigT::kStages) {
      load_queries<T, ConfigT>(w, frequencies, state, kRowTiles * kProductRows, smem);
      if constexpr (ConfigT::kFew) finish_item(w, state);
    }
    cuda::commit_copies();
    loader.look_up(places, tile + ConfigT::kStages + 1);
    stage = next_stage<ConfigT::kStages>(stage);
  }
  cuda::wait_copies<0>();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
    add_groups<ConfigT>(w, item, soft[m], out[m], m * kProductRows, smem);
  return ConfigT::kFew && item.sharing.num_parts > 1;
}

/// A block's items, one after the other.
template <typename T, typename ConfigT>
__device__ void attend_block(const Work& w, const Frequencies& frequencies,
                             BlockState<ConfigT>& state, unsigned char* smem) {
  first_item<ConfigT>(w, state);
  if (!state.has_item) return;
  while (true) {
    bool written = false;
    if constexpr (ConfigT::kWide) {
      attend_wide_item<T, ConfigT>(w, frequencies, state, smem);
    } else if constexpr (ConfigT::kFew) {
      written = attend_dealt_keys<T, ConfigT, ConfigT::kRowTiles>(w, frequencies, state, smem);
    } else {
      const int rows = state.item.num_rows();
      if (rows <= kProductRows) {
        written = attend_dealt_keys<T, ConfigT, 1>(w, frequencies, state, smem);
      } else if constexpr (ConfigT::kDrifts) {
        written = attend_drifting_rows<T, ConfigT>(w, frequencies, state, smem);
      } else if (ConfigT::kRowTiles == 1 || rows * 2 <= ConfigT::kRows) {
        written = attend_dealt_rows<T, ConfigT, 1>(w, frequencies, state, smem);
      } else {
        written = attend_dealt_rows<T, ConfigT, ConfigT::kRowTiles>(w, frequencies, state, smem);
      }
    }
    if (!written) {
      __syncthreads();
      write_results<T, ConfigT>(w, state, Results<ConfigT>{smem});
    }
    if (state.item.sharing.num_parts > 1) share_piece<T, ConfigT>(w, state);
    if (!state.has_more) return;
    next_item(w, state);
  }
}

}  // namespace octavo::kernels::flash2
