// SPDX-License-Identifier: Apache-2.0
// Pieces of one sequence that several blocks share: the last of them to arrive adds all parts, in
// their order.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/tensor_core.cuh"
#include "kernels/cuda/flash2/pieces.cuh"

namespace octavo::kernels::flash2 {

/// Parts of a piece that are added together: first, first + step …
struct PartRun {
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::int32_t step = 1;
};

/// Reads from the L2: another block wrote it.
__device__ inline void read_sums(const float* from, float (&to)[2]) {
  const float2 values = __ldcg(reinterpret_cast<const float2*>(from));
  to[0] = values.x;
  to[1] = values.y;
}
__device__ inline void read_sums(const float* from, float (&to)[4]) {
  const float4 values = __ldcg(reinterpret_cast<const float4*>(from));
  to[0] = values.x;
  to[1] = values.y;
  to[2] = values.z;
  to[3] = values.w;
}

/// Sums of a row, of a part or over parts; a lane has kVector dims of each kStep.
template <typename ConfigT>
struct RowSums {
  static constexpr int kVector = ConfigT::kDimV / kLanes < 4 ? 2 : 4;
  static constexpr int kStep = kVector * kLanes;
  static constexpr int kVectors = ConfigT::kDimV / kStep;

  RowStats stats;
  float values[kVectors][kVector];
};

/// Rows of the partial results of slots, counted from their first; by a warp.
struct SlotPartials {
  float* sums;
  RowStats* stats;

  explicit __device__ SlotPartials(const Work& w)
      : sums(w.partials + w.slot_partials * w.dim), stats(w.stats + w.slot_partials) {}

  template <typename ConfigT>
  [[nodiscard]] __device__ float* row(std::int32_t place) const {
    return sums + std::int64_t{place} * ConfigT::kDimV +
           lane_of_thread() * RowSums<ConfigT>::kVector;
  }
  template <typename ConfigT>
  [[nodiscard]] __device__ RowSums<ConfigT> read(std::int32_t place) const {
    using Sums = RowSums<ConfigT>;
    Sums to;
    const float4 own = __ldcg(reinterpret_cast<const float4*>(stats + place));
    to.stats = {own.x, own.y, own.z};
    const float* from = row<ConfigT>(place);
#pragma unroll
    for (int v = 0; v < Sums::kVectors; ++v) read_sums(from + v * Sums::kStep, to.values[v]);
    return to;
  }
  template <typename ConfigT>
  __device__ void write(std::int32_t place, const RowSums<ConfigT>& from) const {
    using Sums = RowSums<ConfigT>;
    float* to = row<ConfigT>(place);
#pragma unroll
    for (int v = 0; v < Sums::kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < Sums::kVector; ++e) to[v * Sums::kStep + e] = from.values[v][e];
    }
    if (lane_of_thread() == 0) stats[place] = from.stats;
  }
};

/// sums += parts, in their order.
template <typename ConfigT, int kParts>
__device__ void add_sums(RowSums<ConfigT>& sums, const RowSums<ConfigT> (&parts)[kParts]) {
  using Sums = RowSums<ConfigT>;
  float max = sums.stats.base;
#pragma unroll
  for (const Sums& part : parts) max = fmaxf(max, part.stats.base);
  const float base = finite_base(max);
  const float kept = cuda::fast_exp2(sums.stats.base - base);
  sums.stats = {max, sums.stats.sum * kept, sums.stats.exact * kept};
#pragma unroll
  for (auto& values : sums.values) {
    for (float& value : values) value *= kept;
  }
#pragma unroll
  for (const Sums& part : parts) {
    const float share = cuda::fast_exp2(part.stats.base - base);
    add_stats(sums.stats, part.stats, share);
#pragma unroll
    for (int v = 0; v < Sums::kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < Sums::kVector; ++e) sums.values[v][e] += part.values[v][e] * share;
    }
  }
}

/// To the output and the LSE, by a warp; `row` of the item's tile.
template <typename T, typename ConfigT>
__device__ void write_row(const Work& w, const Item& item, int row, const RowSums<ConfigT>& sums) {
  using Sums = RowSums<ConfigT>;
  const AttendParams& a = w.attend;
  const int first_dim = lane_of_thread() * Sums::kVector;
  const RowPlace place = place_of_row(w, item, row);
  const float factor = factor_of(a, place.head, sums.stats);
  const std::int64_t to = row_offset(a.out_layout, item, place) + first_dim;
#pragma unroll
  for (int v = 0; v < Sums::kVectors; ++v) {
    if (v * Sums::kStep + first_dim >= a.head_dim_v) break;
    if (w.out_in_vectors) {
#pragma unroll
      for (int e = 0; e < Sums::kVector; e += 2) {
        *reinterpret_cast<std::uint32_t*>(static_cast<T*>(a.out) + to + v * Sums::kStep + e) =
            cuda::pack_pair<T>(sums.values[v][e] * factor, sums.values[v][e + 1] * factor);
      }
      continue;
    }
#pragma unroll
    for (int e = 0; e < Sums::kVector; ++e) {
      cuda::store_element(a.out, a.out_dtype, to + v * Sums::kStep + e, sums.values[v][e] * factor);
    }
  }
  if (lane_of_thread() == 0) write_lse(a, item.begin_token + place.token, place.head, sums.stats);
}

/// Adds parts of rows row, row + kWarps … of a piece, kRows at most and before end_row, in their
/// order, by a warp: to the output, or in place of the first of them. Code that is new to the
/// multiprocessor costs more than what it does, so that there is little of it; loads that wait for
/// each other cost as much, hence several parts and rows.
template <typename T, typename ConfigT, int kRows>
__device__ void add_parts(const Work& w, const Item& item, PartRun run, bool to_output, int row,
                          int end_row) {
  using Sums = RowSums<ConfigT>;
  constexpr int kFloats = Sums::kVectors * Sums::kVector;
  constexpr bool kShort = ConfigT::kBlocks > 2;  // of registers
  constexpr int kAtOnce = kFloats <= 4 ? kShort ? 8 / kRows : 8 : kFloats <= 8 ? 4 : 2;
  const auto slot_rows = static_cast<std::int32_t>(w.slot_rows);
  const SlotPartials partials{w};
  const auto place_of = [&](std::int32_t part) {
    return partial_of(item.sharing, part) * slot_rows + row;
  };
  const auto row_on = [&](int n) { return min(n * ConfigT::kWarps, end_row - 1 - row); };
  std::int32_t first = place_of(run.first);
  std::int32_t next = place_of(run.first + run.step);
  const std::int32_t apart = 2 * run.step * slot_rows;
  Sums sums[kRows];
#pragma unroll
  for (int n = 0; n < kRows; ++n) sums[n] = partials.read<ConfigT>(first + row_on(n));
#pragma unroll 1
  for (std::int32_t left = run.count - 1; left > 0; left -= kAtOnce) {
    Sums parts[kRows][kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int32_t place = next + min(i, left - 1) * apart;
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        parts[n][i] = partials.read<ConfigT>(place + row_on(n));
        if (i >= left) parts[n][i].stats.base = -INFINITY;  // was read before: no weight
      }
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) add_sums<ConfigT>(sums[n], parts[n]);
    next += kAtOnce * apart;
  }
#pragma unroll 1
  for (int n = 0; n < kRows && row < end_row; ++n) {
    if (to_output) {
      write_row<T, ConfigT>(w, item, row, sums[0]);
    } else {
      __syncwarp();  // all lanes have read the largest logit that one writes over
      partials.write<ConfigT>(first, sums[0]);
    }
    row += ConfigT::kWarps;
    first += ConfigT::kWarps;
    if constexpr (kRows == 2) sums[0] = sums[1];
  }
}

/// The same for all rows, by all threads.
template <typename T, typename ConfigT>
__device__ void add_rows(const Work& w, const Item& item, PartRun run, bool to_output) {
  const int rows = item.num_rows();
  const int first_row = warp_of_thread();
  constexpr int kMany = 2;
  if (rows <= ConfigT::kWarps) {
    if (first_row < rows) add_parts<T, ConfigT, 1>(w, item, run, to_output, first_row, rows);
    return;
  }
#pragma unroll 1
  for (int row = first_row; row < rows; row += kMany * ConfigT::kWarps)
    add_parts<T, ConfigT, kMany>(w, item, run, to_output, row, rows);
}

/// Whether the block is the last of `blocks` that say to `arrived` that what they wrote is there;
/// then the counter is 0 again, for the next call. By all threads.
__device__ inline bool arrives_last(std::uint32_t* arrived, std::int32_t blocks) {
  __syncthreads();
  bool is_last = false;
  if (threadIdx.x == 0) {
    is_last = cuda::count_arrival(arrived) + 1 == static_cast<std::uint32_t>(blocks);
    if (is_last) *arrived = 0;
  }
  return __syncthreads_or(static_cast<int>(is_last)) != 0;
}

/// The block's part of a piece is written; the last block to say so adds them all. Of parts that
/// are too much for one block those of a group are added first, by the last of its blocks.
template <typename T, typename ConfigT>
__device__ void share_piece_here(const Work& w, BlockState<ConfigT>& state) {
  const Item& item = state.item;
  const std::int32_t parts = item.sharing.num_parts;
  const std::int32_t group = parts_of_group(parts, item.num_rows() * ConfigT::kDimV);
  std::uint32_t* const counters = w.arrived + item.sharing.first_slot;
  bool to_output = group >= parts;
  PartRun run{0, parts, 1};
  std::uint32_t* arrived = counters;
  if (!to_output) {
    const std::int32_t part = state.slot - item.sharing.first_slot;
    run.first = part - part % group;
    run.count = min(group, parts - run.first);
    arrived += run.first;
  }
#pragma unroll 1
  while (true) {
    // The last slot's counter may be the first of the next piece; a group of one has none.
    if (to_output || run.count > 1) {
      if (!arrives_last(arrived, run.count)) return;
      add_rows<T, ConfigT>(w, item, run, to_output);
    }
    if (to_output) return;
    to_output = true;
    run = {0, ceil_div_small(parts, group), group};
    arrived = counters + 1;  // no group's
  }
}

/// The same. Not inlined where registers are short; a function that isn't reads what it is told of
/// the work by loads that it waits for.
template <typename T, typename ConfigT>
__device__ __noinline__ void share_piece_apart(const Work& w, BlockState<ConfigT>& state) {
  share_piece_here<T, ConfigT>(w, state);
}
template <typename T, typename ConfigT>
__device__ void share_piece(const Work& w, BlockState<ConfigT>& state) {
  if constexpr (ConfigT::kFew) {
    share_piece_here<T, ConfigT>(w, state);
  } else {
    share_piece_apart<T, ConfigT>(w, state);
  }
}

}  // namespace octavo::kernels::flash2
