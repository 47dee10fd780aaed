// SPDX-License-Identifier: Apache-2.0
// One item of a step by one block of four warps: online softmax over key tiles that come through a
// ring of buffers.
//
// An item of more than 16 rows has them dealt to the warps, sixteen each, and every warp looks at
// all keys. With up to 16 rows (decode) the keys are dealt instead: of each tile a warp looks at
// the sixteen that it brought itself, so that warps need not wait for each other before the end,
// when their sums are added in the order of the warps.
//
// Each tile of K and of V is a group of copies of its own, in the order K0 V0 K1 V1 …, so that
// with kStages tiles under way a wait for the next to be used leaves 2 kStages - 1 groups.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/flash2/products.cuh"

namespace octavo::kernels::flash2 {

/// Writes dims 8 first_tile … of a row, 8 kTiles of them.
template <typename T, int kDim, int kTiles>
__device__ void write_row(const Work& w, const Item& item, const RowPlace& place, RowStats stats,
                          const float (&out)[kTiles][4], int first_tile, int r, int lane) {
  const AttendParams& a = w.attend;
  const int first = first_tile * 8 + 2 * (lane % 4);
  const bool writes_stats = first_tile == 0 && lane % 4 == 0;
  if (item.num_splits > 1) {
    const std::int64_t row =
        w.cut.partial_offsets[item.b] + std::int64_t{place.token} * item.num_splits + item.split;
    const std::int64_t at = row * a.num_q_heads + place.head;
    if (writes_stats) w.stats[at] = stats;
    if (stats.sum == 0.0F) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      *reinterpret_cast<float2*>(w.partials + at * kDim + n * 8 + first) = {out[n][2 * r],
                                                                            out[n][2 * r + 1]};
    }
    return;
  }
  if (writes_stats) write_lse(a, item.b, place.token, place.head, stats);
  const float factor = factor_of(a, place.head, stats);
  const std::int64_t to = cuda::token_offset(a.out_layout, a.batch, item.b, place.token) +
                          place.head * a.out_layout.head_stride + first;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if ((first_tile + n) * 8 >= a.head_dim_v) break;
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

/// The item's shared memory, and the tiles on their way to it.
template <int kDim>
class Ring {
 public:
  static constexpr int kStages = TileShape<kDim>::kStages;
  static constexpr int kPending = 2 * kStages - 1;

  __device__ Ring(const Work& w, const Item& item, const unsigned char* smem)
      : loader_(w, item), end_tile_(item.end_tile), q_(cuda::smem_address(smem)) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      const bool exists = item.first_tile + s < item.end_tile;
      loader_.look_up(item.first_tile + s);
      stage_ = s;
      if (exists) loader_.load_keys(k());
      cuda::commit_copies();
      if (exists) loader_.load_values(v());
      cuda::commit_copies();
    }
    stage_ = 0;
    loader_.look_up(item.first_tile + kStages);
  }

  [[nodiscard]] __device__ SmemAddress q() const { return q_; }
  [[nodiscard]] __device__ SmemAddress k() const {
    return q_ + (1 + stage_) * TileShape<kDim>::kBytes;
  }
  [[nodiscard]] __device__ SmemAddress v() const {
    return q_ + (1 + kStages + stage_) * TileShape<kDim>::kBytes;
  }

  /// Nobody needs the keys of `tile` any more: those kStages on take their place.
  __device__ void next_keys(int tile) {
    if (tile + kStages < end_tile_) loader_.load_keys(k());
    cuda::commit_copies();
  }
  /// The same of the values; the tile is done.
  __device__ void next_values(int tile) {
    if (tile + kStages < end_tile_) loader_.load_values(v());
    cuda::commit_copies();
    loader_.look_up(tile + kStages + 1);
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

 private:
  KeyLoader<kDim> loader_;
  int end_tile_;
  SmemAddress q_;
  int stage_ = 0;
};

/// Keys that every row of an item sees.
__device__ inline KeyRange seen_by_all(const AttendParams& a, const Item& item) {
  const std::int64_t last = item.first_position + item.num_tokens - 1;
  return {
      visible_keys(a.causal, a.window_left, a.window_right, last, item.kv_len).begin,
      visible_keys(a.causal, a.window_left, a.window_right, item.first_position, item.kv_len).end};
}

template <typename T, int kDim>
__device__ void attend_dealt_rows(const Work& w, const Item& item, Ring<kDim>& ring) {
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const bool has_rows = warp * kWarpRows < item.num_rows();
  const int first_row = warp * kWarpRows + lane / 4;
  const RowMask mask = row_mask(w, item, first_row);
  const KeyRange whole = seen_by_all(w.attend, item);
  float out[kDim / 8][4] = {};
  RowStats stats[2] = {{-INFINITY, 0.0F}, {-INFINITY, 0.0F}};
#pragma unroll 1
  for (int tile = item.first_tile; tile < item.end_tile; ++tile) {
    Scores<kTileKeys / 8> scores;
    cuda::wait_copies<Ring<kDim>::kPending>();
    __syncthreads();
    if (has_rows) {
      multiply_keys<T, kDim, kTileKeys / 8>(scores, ring.q(), warp * kWarpRows, ring.k(), 0, lane);
    }
    __syncthreads();
    ring.next_keys(tile);
    if (has_rows) {
      const int key = tile * kTileKeys;
      const bool masked = key < whole.begin || key + kTileKeys > whole.end;
      to_logits<kTileKeys / 8>(w.attend, mask, key + 2 * (lane % 4), masked, scores);
      weigh<kDim, kTileKeys / 8>(scores, stats, out);
    }
    cuda::wait_copies<Ring<kDim>::kPending>();
    __syncthreads();
    if (has_rows) multiply_values<T, kDim, kTileKeys / 8>(out, scores, ring.v(), 0, lane);
    __syncthreads();
    ring.next_values(tile);
  }
  cuda::wait_copies<0>();
  if (!has_rows) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    stats[r].sum = sum_of_row(stats[r].sum);
    const RowPlace place = place_of_row(item, first_row + 8 * r);
    if (place.exists) write_row<T, kDim, kDim / 8>(w, item, place, stats[r], out, 0, r, lane);
  }
}

/// Adds the sums that the warps have of the same rows; each warp ends up with a quarter of the dims
/// and writes it.
template <typename T, int kDim>
__device__ void add_warps(const Work& w, const Item& item, RowStats (&stats)[2],
                          const float (&out)[kDim / 8][4], unsigned char* smem) {
  constexpr int kTiles = kDim / 8;
  constexpr int kOwnTiles = kTiles / kWarps;
  static_assert(kWarps * kTiles * 4 * kLanes * sizeof(float) <=
                TileShape<kDim>::kSmemBytes - TileShape<kDim>::kBytes);
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  auto* all_stats = reinterpret_cast<RowStats*>(smem);  // [warps, 2, lanes], where q was
  auto* all_out =
      reinterpret_cast<float*>(smem + TileShape<kDim>::kBytes);  // [warps, tiles, 4, lanes]
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    stats[r].sum = sum_of_row(stats[r].sum);
    all_stats[(warp * 2 + r) * kLanes + lane] = stats[r];
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) all_out[((warp * kTiles + n) * 4 + e) * kLanes + lane] = out[n][e];
  }
  __syncthreads();
  float own[kOwnTiles][4] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float max = -INFINITY;
#pragma unroll
    for (int from = 0; from < kWarps; ++from)
      max = fmaxf(max, all_stats[(from * 2 + r) * kLanes + lane].max);
    RowStats sums{max, 0.0F};
    const float base = max == -INFINITY ? 0.0F : max;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      const RowStats part = all_stats[(from * 2 + r) * kLanes + lane];
      const float share = cuda::fast_exp2(part.max - base);
      sums.sum += part.sum * share;
#pragma unroll
      for (int n = 0; n < kOwnTiles; ++n) {
        const int tile = from * kTiles + warp * kOwnTiles + n;
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e)
          own[n][e] += all_out[(tile * 4 + e) * kLanes + lane] * share;
      }
    }
    const RowPlace place = place_of_row(item, lane / 4 + 8 * r);
    if (place.exists)
      write_row<T, kDim, kOwnTiles>(w, item, place, sums, own, warp * kOwnTiles, r, lane);
  }
}

template <typename T, int kDim>
__device__ void attend_dealt_keys(const Work& w, const Item& item, Ring<kDim>& ring,
                                  unsigned char* smem) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first_key = static_cast<int>(threadIdx.x) / kLanes * kWarpKeys;
  const RowMask mask = row_mask(w, item, lane / 4);
  const KeyRange whole = seen_by_all(w.attend, item);
  float out[kDim / 8][4] = {};
  RowStats stats[2] = {{-INFINITY, 0.0F}, {-INFINITY, 0.0F}};
  __syncthreads();  // q is there
#pragma unroll 1
  for (int tile = item.first_tile; tile < item.end_tile; ++tile) {
    Scores<kWarpKeys / 8> scores;
    cuda::wait_copies<Ring<kDim>::kPending>();
    __syncwarp();
    multiply_keys<T, kDim, kWarpKeys / 8>(scores, ring.q(), 0, ring.k(), first_key, lane);
    __syncwarp();
    ring.next_keys(tile);
    const int key = tile * kTileKeys + first_key;
    const bool masked = key < whole.begin || key + kWarpKeys > whole.end;
    to_logits<kWarpKeys / 8>(w.attend, mask, key + 2 * (lane % 4), masked, scores);
    weigh<kDim, kWarpKeys / 8>(scores, stats, out);
    cuda::wait_copies<Ring<kDim>::kPending>();
    __syncwarp();
    multiply_values<T, kDim, kWarpKeys / 8>(out, scores, ring.v(), first_key, lane);
    __syncwarp();
    ring.next_values(tile);
  }
  cuda::wait_copies<0>();
  add_warps<T, kDim>(w, item, stats, out, smem);
}

template <typename T, int kDim>
__device__ void attend_block(const Work& w, const Frequencies& frequencies, unsigned char* smem) {
  const Item item = item_of_block(w);
  if (item.num_tokens == 0) return;
  Ring<kDim> ring(w, item, smem);
  load_queries<T, kDim>(w, frequencies, item, smem);
  if (item.num_rows() > kWarpRows) {
    attend_dealt_rows<T, kDim>(w, item, ring);
  } else {
    attend_dealt_keys<T, kDim>(w, item, ring, smem);
  }
}

}  // namespace octavo::kernels::flash2
