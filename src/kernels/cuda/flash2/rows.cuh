// SPDX-License-Identifier: Apache-2.0
// Rows that one warp has for itself, where rows are dealt to warps: which keys they see, how they
// come from q, and their way out. Warps needn't wait for each other for any of it.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/tensor_core.cuh"
#include "kernels/cuda/flash2/pieces.cuh"
#include "kernels/cuda/flash2/products.cuh"
#include "kernels/cuda/flash2/results.cuh"
#include "kernels/cuda/flash2/tile.cuh"

namespace octavo::kernels::flash2 {

/// Of the parts of a tile's keys, one bit each from the lowest on: whether some row sees some of a
/// part; and kMasked for the lowest: whether some row doesn't see some.
inline constexpr unsigned kSeesAny = 0xFFFF;
inline constexpr unsigned kMasked = 0x10000;
template <int kPartKeys, int kKeys>
__device__ unsigned sights_of(const RowSpan& span, int first_key) {
  unsigned sights = 0;
#pragma unroll
  for (int part = 0; part < kKeys / kPartKeys; ++part) {
    const int begin = first_key + part * kPartKeys;
    const int end = begin + kPartKeys;
    if (begin < span.end && end > span.begin) sights |= 1U << part;
    if (begin < span.whole_begin || end > span.whole_end) sights |= kMasked << part;
  }
  return sights;
}

/// What rows first_row … first_row + kWarpRows - 1 see, to `span`, by a warp.
template <int kWarpRows>
__device__ void find_span(const Work& w, const Item& item, int first_row, RowSpan& span) {
  const int lane = lane_of_thread();
  const RowPlace place = place_of_row(w, item, first_row + lane % kWarpRows);
  const std::int32_t position = item.first_position + place.token - item.first_token;
  const std::int32_t begin = w.shape.reach.begin(position);
  const std::int32_t end = w.shape.reach.end(position, item.kv_len);
  const RowSpan found = {
      __reduce_min_sync(kAllLanes, place.exists ? begin : Reach::kFar),
      __reduce_max_sync(kAllLanes, place.exists ? end : 0),
      __reduce_max_sync(kAllLanes, place.exists ? begin : 0),
      __reduce_min_sync(kAllLanes, place.exists ? end : Reach::kFar),
  };
  if (lane == 0) span = found;
  __syncwarp();
}

/// Where each of a warp's rows lies, a row a lane, told to the lanes that copy it: a step of
/// kRowsAtOnce rows after the other, 16 bytes a lane.
template <typename ConfigT>
struct RowCopies {
  static constexpr int kChunks = ConfigT::kDim / kChunk;
  static constexpr int kRowsAtOnce = kLanes / kChunks;

  std::int64_t own;  ///< Offset of the lane's row; kNoOffset: there is none.

  __device__ static int lane() { return lane_of_thread(); }
  __device__ static int row() { return lane() / kChunks; }  ///< In its step.
  __device__ static int chunk() { return lane() % kChunks; }
  [[nodiscard]] __device__ std::int64_t offset(int first) const {
    return __shfl_sync(kAllLanes, own, first + row());
  }
};

/// Brings the warp's rows of q by copies of the threads' open groups.
template <typename T, typename ConfigT, int kWarpRows>
__device__ void copy_own_queries(const Work& w, const Item& item, int first_row, SmemAddress q) {
  using Copies = RowCopies<ConfigT>;
  const Copies copies{query_offset(w, item, first_row + Copies::lane() % kWarpRows)};
  const SmemAddress to = q + place_of<ConfigT>(first_row + Copies::row(), Copies::chunk());
  const auto* from = static_cast<const T*>(w.attend.q) + Copies::chunk() * kChunk;
  const bool has_chunk = Copies::chunk() * kChunk < w.attend.head_dim;
#pragma unroll
  for (int at = 0; at < kWarpRows; at += Copies::kRowsAtOnce) {
    const std::int64_t offset = copies.offset(at);
    const bool valid = offset != kNoOffset && has_chunk;
    cuda::copy_async(rows_on<ConfigT>(to, at), valid ? from + offset : w.attend.q, valid);
  }
}

/// Sums of the warp's rows to the output, 16 bytes a lane, through the place that its rows of q
/// had; and the LSE.
template <typename T, typename ConfigT, int kRowTiles>
__device__ void write_own_rows(const Work& w, const Item& item, int first_row, unsigned char* smem,
                               const SoftRows (&soft)[kRowTiles],
                               const float (&out)[kRowTiles][ConfigT::kDim / 8][4]) {
  using Copies = RowCopies<ConfigT>;
  constexpr int kWarpRows = kRowTiles * kProductRows;
  const AttendParams& a = w.attend;
  const int lane = Copies::lane();
  // A row a lane.
  const int own = lane % kWarpRows;
  RowStats stats;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowStats there = stats_of_row(soft[m], r);
      const auto told = [&](float value) { return __shfl_sync(kAllLanes, value, own % 8 * 4); };
      const RowStats row{told(there.base), told(there.sum), told(there.exact)};
      if (own / 8 == 2 * m + r) stats = row;
    }
  }
  const RowPlace place = place_of_row(w, item, first_row + own);
  float factor = 0.0F;
  if (place.exists) {
    factor = factor_of(a, place.head, stats);
    if (lane == own) write_lse(a, item.begin_token + place.token, place.head, stats);
  }
  const Copies copies{place.exists ? row_offset(a.out_layout, item, place) : kNoOffset};
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = m * kProductRows + lane / 4 + 8 * r;
      const float by = __shfl_sync(kAllLanes, factor, row);
#pragma unroll
      for (int n = 0; n < ConfigT::kDim / 8; ++n) {
        *reinterpret_cast<std::uint32_t*>(smem + place_of<ConfigT>(first_row + row, n) +
                                          lane % 4 * 4) =
            cuda::pack_pair<T>(out[m][n][2 * r] * by, out[m][n][2 * r + 1] * by);
      }
    }
  }
  __syncwarp();
  auto* to = static_cast<T*>(a.out) + Copies::chunk() * kChunk;
  const bool has_chunk = Copies::chunk() * kChunk < a.head_dim_v;
#pragma unroll
  for (int at = 0; at < kWarpRows; at += Copies::kRowsAtOnce) {
    const std::int64_t offset = copies.offset(at);
    if (offset == kNoOffset || !has_chunk) continue;
    *reinterpret_cast<uint4*>(to + offset) = *reinterpret_cast<const uint4*>(
        smem + place_of<ConfigT>(first_row + at + Copies::row(), Copies::chunk()));
  }
}

/// The warp's sums to the output, 16 bytes at a time where they go there so, and else to where
/// write_results finds them. Returns whether they are written. By all threads.
template <typename T, typename ConfigT, int kRowTiles>
__device__ bool finish_own_rows(const Work& w, const Item& item, int first_row, int lane,
                                unsigned char* smem, const SoftRows (&soft)[kRowTiles],
                                const float (&out)[kRowTiles][ConfigT::kDim / 8][4]) {
  const bool has_rows = first_row < item.num_rows();
  if (w.out_in_vectors && item.partial_base < 0) {
    if (has_rows) write_own_rows<T, ConfigT>(w, item, first_row, smem, soft, out);
    return true;
  }
  __syncthreads();  // all is read: the results take its place
  if (!has_rows) return false;
  const Results<ConfigT> results{smem};
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + m * kProductRows + lane / 4 + 8 * r;
      const RowStats stats = stats_of_row(soft[m], r);
      if (lane % 4 == 0) results.stats()[row] = stats;
#pragma unroll
      for (int n = 0; n < ConfigT::kDim / 8; ++n) {
        *reinterpret_cast<float2*>(results.row(row) + n * 8 + lane % 4 * 2) = {
            out[m][n][2 * r], out[m][n][2 * r + 1]};
      }
    }
  }
  return false;
}

}  // namespace octavo::kernels::flash2
