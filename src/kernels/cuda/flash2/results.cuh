// SPDX-License-Identifier: Apache-2.0
// An item's results in shared memory, and their way out: to the output, or to the partial results.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/tensor_core.cuh"
#include "kernels/cuda/flash2/pieces.cuh"

namespace octavo::kernels::flash2 {

/// Sums of an item's rows, F32, not yet divided, and their stats; where q, K and V were.
template <typename ConfigT>
struct Results {
  static constexpr int kStatsOffset = 4096;  ///< Bytes; in front of it lie those of add_groups.
  static constexpr int kOffset = 8192;
  /// Floats from row to row: eight rows of a product go to different banks.
  static constexpr int kPitch = ConfigT::kDim + 8;
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
__device__ void write_partials(const Work& w, const Item& item, const Results<ConfigT>& results) {
  constexpr int kChunks = ConfigT::kDim / 4;
  for (int c = static_cast<int>(threadIdx.x); c < item.num_rows() * kChunks;
       c += ConfigT::kThreads) {
    const int row = c / kChunks;
    const int dim = c % kChunks * 4;
    const std::int64_t at = partial_row(item, place_of_row(w, item, row));
    if (dim == 0) w.stats[at] = results.stats()[row];
    *reinterpret_cast<float4*>(w.partials + at * ConfigT::kDim + dim) =
        *reinterpret_cast<const float4*>(results.row(row) + dim);
  }
}

/// By all threads, once the results are there.
template <typename T, typename ConfigT>
__device__ __noinline__ void write_results(const Work& w, const Item& item,
                                           Results<ConfigT> results) {
  if (item.partial_base >= 0) {
    write_partials(w, item, results);
    return;
  }
  constexpr int kChunks = ConfigT::kDim / kChunk;
  const AttendParams& a = w.attend;
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < item.num_rows() * kChunks;
       c += ConfigT::kThreads) {
    const int row = c / kChunks;
    const int dim = c % kChunks * kChunk;
    const RowPlace place = place_of_row(w, item, row);
    const RowStats stats = results.stats()[row];
    if (dim == 0) write_lse(a, item.b, place.token, place.head, stats);
    if (dim >= a.head_dim_v) continue;
    const float factor = factor_of(a, place.head, stats);
    const float* values = results.row(row) + dim;
    const std::int64_t to = cuda::token_offset(a.out_layout, a.batch, item.b, place.token) +
                            place.head * a.out_layout.head_stride + dim;
    if (w.out_in_vectors) {
      uint4 bits;
      bits.x = cuda::pack_pair<T>(values[0] * factor, values[1] * factor);
      bits.y = cuda::pack_pair<T>(values[2] * factor, values[3] * factor);
      bits.z = cuda::pack_pair<T>(values[4] * factor, values[5] * factor);
      bits.w = cuda::pack_pair<T>(values[6] * factor, values[7] * factor);
      *reinterpret_cast<uint4*>(static_cast<T*>(a.out) + to) = bits;
    } else {
#pragma unroll 1
      for (int e = 0; e < kChunk; ++e)
        cuda::store_element(a.out, a.out_dtype, to + e, values[e] * factor);
    }
  }
}

}  // namespace octavo::kernels::flash2
