// SPDX-License-Identifier: Apache-2.0
// An item's results in shared memory, and their way out: to the output, or to the partial results.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/step.cuh"
#include "kernels/cuda/common/tensor_core.cuh"
#include "kernels/cuda/flash2/pieces.cuh"

namespace octavo::kernels::flash2 {

/// Sums of an item's rows, F32, not yet divided, and their stats; where q, K and V were.
template <typename ConfigT>
struct Results {
  static constexpr int kStatsOffset = 4096;  ///< Bytes; in front of it lie those of add_groups.
  static constexpr int kOffset = 8192;
  /// Floats from row to row: eight rows of a product go to different banks.
  static constexpr int kPitch = ConfigT::kDimV + 8;
  static_assert(kStatsOffset + ConfigT::kRows * sizeof(RowStats) <= kOffset);
  static_assert(kOffset + ConfigT::kRows * kPitch * sizeof(float) <= ConfigT::kSmemBytes);
  /// Where add_groups keeps the sums of all groups, behind its results.
  static constexpr int kSumsOffset =
      kOffset + (ConfigT::kFew ? ConfigT::kRows : kProductRows) * kPitch * 4;

  unsigned char* smem;

  [[nodiscard]] __device__ RowStats* stats() const {
    return reinterpret_cast<RowStats*>(smem + kStatsOffset);
  }
  [[nodiscard]] __device__ float* row(int row) const {
    return reinterpret_cast<float*>(smem + kOffset) + row * kPitch;
  }
};

template <typename ConfigT>
__device__ void write_partials(const Work& w, const BlockState<ConfigT>& state,
                               const Results<ConfigT>& results) {
  constexpr int kChunks = ConfigT::kDimV / 4;
#pragma unroll 4
  for (int c = static_cast<int>(threadIdx.x); c < state.item.num_rows() * kChunks;
       c += ConfigT::kThreads) {
    const int row = c / kChunks;
    const int dim = c % kChunks * 4;
    *reinterpret_cast<float4*>(w.partials + state.row_offsets[row] * ConfigT::kDimV + dim) =
        *reinterpret_cast<const float4*>(results.row(row) + dim);
  }
}

template <typename T, typename ConfigT>
__device__ void write_outputs(const Work& w, const BlockState<ConfigT>& state,
                              const Results<ConfigT>& results) {
  constexpr int kChunks = ConfigT::kDimV / kChunk;
  const AttendParams& a = w.attend;
#pragma unroll 2
  for (int c = static_cast<int>(threadIdx.x); c < state.item.num_rows() * kChunks;
       c += ConfigT::kThreads) {
    const int row = c / kChunks;
    const int dim = c % kChunks * kChunk;
    if (dim >= a.head_dim_v) continue;
    const float factor = results.stats()[row].sum;
    const float4 low = *reinterpret_cast<const float4*>(results.row(row) + dim);
    const float4 high = *reinterpret_cast<const float4*>(results.row(row) + dim + 4);
    uint4 bits;
    bits.x = cuda::pack_pair<T>(low.x * factor, low.y * factor);
    bits.y = cuda::pack_pair<T>(low.z * factor, low.w * factor);
    bits.z = cuda::pack_pair<T>(high.x * factor, high.y * factor);
    bits.w = cuda::pack_pair<T>(high.z * factor, high.w * factor);
    *reinterpret_cast<uint4*>(static_cast<T*>(a.out) + state.row_offsets[row] + dim) = bits;
  }
}

/// By all threads, once the results are there.
template <typename T, typename ConfigT>
__device__ __noinline__ void write_results(const Work& w, BlockState<ConfigT>& state,
                                           Results<ConfigT> results) {
  const AttendParams& a = w.attend;
  const Item& item = state.item;
  const bool is_part = item.partial_base >= 0;
  // Where each row goes; in place of its sum what it is to be multiplied with.
  for (int row = static_cast<int>(threadIdx.x); row < item.num_rows(); row += ConfigT::kThreads) {
    const RowPlace place = place_of_row(w, item, row);
    const RowStats stats = results.stats()[row];
    if (is_part) {
      state.row_offsets[row] = partial_row(item, place);
      w.stats[state.row_offsets[row]] = stats;
    } else {
      state.row_offsets[row] = row_offset(a.out_layout, item, place);
      write_lse(a, item.begin_token + place.token, place.head, stats);
      results.stats()[row].sum = factor_of(a, place.head, stats);
    }
  }
  __syncthreads();
  if (is_part) {
    write_partials(w, state, results);
  } else if (w.out_in_vectors) {
    write_outputs<T>(w, state, results);
  } else {
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x); c < item.num_rows() * ConfigT::kDimV;
         c += ConfigT::kThreads) {
      const int row = c / ConfigT::kDimV;
      const int dim = c % ConfigT::kDimV;
      if (dim >= a.head_dim_v) continue;
      cuda::store_element(a.out, a.out_dtype, state.row_offsets[row] + dim,
                          results.row(row)[dim] * results.stats()[row].sum);
    }
  }
}

}  // namespace octavo::kernels::flash2
