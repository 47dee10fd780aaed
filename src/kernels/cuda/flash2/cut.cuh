// SPDX-License-Identifier: Apache-2.0
// The step's cut, from its lengths, by one block. Sums of integers, so that no order matters.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/step.cuh"
#include "kernels/cuda/flash2/work.h"

namespace octavo::kernels::flash2 {

inline constexpr int kCutThreads = 256;
inline constexpr int kCutWarps = kCutThreads / 32;

struct CutTotals {
  std::int64_t items = 0;
  std::int64_t partials = 0;
};

__device__ inline CutTotals plus(CutTotals a, CutTotals b) {
  return {a.items + b.items, a.partials + b.partials};
}

/// The sum of the values of the threads up to and with this one, and of all.
struct ScanResult {
  CutTotals own, all;
};
__device__ inline ScanResult scan_block(CutTotals value, CutTotals (&warp_totals)[kCutWarps]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const CutTotals before{__shfl_up_sync(cuda::kAllLanes, value.items, apart),
                           __shfl_up_sync(cuda::kAllLanes, value.partials, apart)};
    if (lane >= apart) value = plus(value, before);
  }
  if (lane == 31) warp_totals[warp] = value;
  __syncthreads();
  ScanResult result{value, {}};
#pragma unroll
  for (int other = 0; other < kCutWarps; ++other) {
    if (other < warp) result.own = plus(result.own, warp_totals[other]);
    result.all = plus(result.all, warp_totals[other]);
  }
  __syncthreads();
  return result;
}

/// What the threads of a block tell each other.
struct CutState {
  CutTotals warp_totals[kCutWarps];
  std::int32_t fewest_units, most_units;  ///< Of a streamed sequence.
};

__device__ inline void cut_block(const Work& w, CutState& state) {
  const StepBatch& batch = w.attend.batch;
  const std::int32_t n = batch.num_seqs;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  if (thread == 0) {
    state.fewest_units = kMostUnits;
    state.most_units = 0;
  }
  __syncthreads();
  CutTotals work;
  std::int64_t streamed = 0;
  for (std::int32_t b = thread; b < n; b += kCutThreads) {
    const std::int32_t new_tokens = cuda::new_tokens(batch, b);
    const std::int32_t kv_len = batch.kv_lens[b];
    work.items += work_of(w.shape, new_tokens, kv_len);
    const std::int32_t units = units_of(w.shape, new_tokens, kv_len);
    streamed += units;
    if (units > 0) {
      atomicMin(&state.fewest_units, units);
      atomicMax(&state.most_units, units);
    }
  }
  work.partials = streamed;
  CutTotals(&warp_totals)[kCutWarps] = state.warp_totals;
  const CutTotals all = scan_block(work, warp_totals).all;
  const std::int64_t run = run_length(w.shape, all.items);
  if (thread == 0) {
    w.cut.item_offsets[0] = w.cut.partial_offsets[0] = 0;
    const bool equal = state.fewest_units == state.most_units;
    *w.cut.slots = slots_of(static_cast<std::int32_t>(all.partials) * w.shape.head_tiles,
                            w.by_most_slots, equal ? state.most_units : 0);
  }
  CutTotals before;
  for (std::int32_t first = 0; first < n; first += kCutThreads) {
    const std::int32_t b = first + thread;
    Cut cut;
    if (b < n) cut = cut_of(w.shape, cuda::new_tokens(batch, b), batch.kv_lens[b], run);
    const ScanResult sums = scan_block({cut.num_items, cut.num_partial_rows}, warp_totals);
    if (b < n) {
      w.cut.item_offsets[b + 1] = before.items + sums.own.items;
      w.cut.partial_offsets[b + 1] = before.partials + sums.own.partials;
      w.cut.split_tiles[b] = cut.split_tiles;
      w.cut.num_splits[b] = cut.num_splits;
    }
    before = plus(before, sums.all);
  }
}

}  // namespace octavo::kernels::flash2
