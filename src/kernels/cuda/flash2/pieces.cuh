// SPDX-License-Identifier: Apache-2.0
// A block's way through its items, and pieces of one sequence that several blocks share: the last
// of them to arrive adds all parts, in their order.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/tensor_core.cuh"
#include "kernels/cuda/flash2/item.cuh"

namespace octavo::kernels::flash2 {

/// Keys that some of a warp's rows see, and that all of them see.
struct alignas(16) RowSpan {
  std::int32_t begin, end, whole_begin, whole_end;
};

/// What all threads of a block know, in shared memory.
template <typename ConfigT>
struct BlockState {
  Item item;
  SlotWalk walk;
  std::int32_t slot;
  bool has_item;
  bool has_more;  ///< Items after this one.
  bool is_last;
  RowSpan spans[ConfigT::kWarps];            ///< Where rows are dealt to warps.
  std::int64_t row_offsets[ConfigT::kRows];  ///< Of the item's rows, in q or where they go to.
};

/// What is found of a piece while its first loads are on their way, in instances for few rows; in
/// others before them. By all threads, or a part of them that has the first.
template <typename ConfigT>
__device__ void finish_item(const Work& w, BlockState<ConfigT>& state) {
  if (threadIdx.x != 0 || state.slot < 0) return;
  state.walk.finish(w, state.slot, state.item);
  state.has_more = !state.walk.done();
}

/// Items and slots take turns in the grid in proportion, so that the arithmetic of prompts and the
/// loads of decodes meet on each multiprocessor; of the items the last come first: under a causal
/// mask they are the longest of a sequence.
struct Turn {
  std::int32_t slot = -1;  ///< Negative: none.
  std::uint32_t item = 0;  ///< Of all_items, where there is no slot.
  bool has_item = false;
};
__device__ inline Turn turn_of_block(std::uint32_t all_items, std::uint32_t slots) {
  const std::uint32_t block = blockIdx.x;
  const std::uint64_t all = std::uint64_t{all_items} + slots;
  if (block >= all) return {};
  // How many slots come before this block, and before the next.
  const auto slot = static_cast<std::uint32_t>(std::uint64_t{block} * slots / all);
  const auto slots_then = static_cast<std::uint32_t>((std::uint64_t{block} + 1) * slots / all);
  if (slots_then > slot) return {static_cast<std::int32_t>(slot), 0, true};
  return {-1, all_items - 1 - (block - slot), true};
}

/// By a warp: the block's first item, to lane 0's `state`.
template <typename ConfigT>
__device__ void find_first_item(const Work& w, BlockState<ConfigT>& state) {
  const int lane = lane_of_thread();
  Turn turn{static_cast<std::int32_t>(blockIdx.x), 0, true};
  Slots slots;
  RowLengths rows;
  Item item;
  SlotWalk walk;
  if (!ConfigT::kFew && w.max_items > 0) {
    const std::int32_t num_seqs = w.attend.batch.num_seqs;
    const auto items = static_cast<std::uint32_t>(w.cut.item_offsets[num_seqs]);  // of a head tile
    CutRow own;
    if (num_seqs <= kLanes) own = cut_row(w, min(lane, num_seqs - 1));
    slots = *w.cut.slots;
    turn = turn_of_block(items * static_cast<std::uint32_t>(w.shape.head_tiles),
                         static_cast<std::uint32_t>(slots.count));
    if (turn.slot >= 0) {
      rows = lengths_of_row(w, lane);
    } else if (turn.has_item) {
      item = cut_item(w, turn.item, items, own);
    }
  } else {
    rows = lengths_of_row(w, lane);
    slots = slots_of_step(w, rows);
  }
  if (turn.slot >= 0) {
    walk = SlotWalk(slots, turn.slot);
    turn.has_item = !walk.done();
    if (turn.has_item) walk.begin(w, rows, item);
  }
  if (lane == 0) {
    state.item = item;
    state.walk = walk;
    state.slot = turn.slot;
    state.has_item = turn.has_item;
    state.has_more = false;
  }
}

/// By all threads.
template <typename ConfigT>
__device__ void first_item(const Work& w, BlockState<ConfigT>& state) {
  if (threadIdx.x < kLanes) {
    find_first_item<ConfigT>(w, state);
    if constexpr (!ConfigT::kFew) finish_item(w, state);
  }
  __syncthreads();
}

/// By all threads, where there is one more; what the last item left in shared memory is gone.
template <typename ConfigT>
__device__ void next_item(const Work& w, BlockState<ConfigT>& state) {
  __syncthreads();
  if (threadIdx.x < kLanes) {
    SlotWalk walk = state.walk;
    Item item = state.item;
    walk.next(w, item);
    __syncwarp();
    if (threadIdx.x == 0) {
      state.item = item;
      state.walk = walk;
    }
    if constexpr (!ConfigT::kFew) finish_item(w, state);
  }
  __syncthreads();
}

struct RowPlace {
  bool exists = false;
  std::int32_t token = 0;  ///< Of the sequence's new ones.
  std::int32_t head = 0;   ///< Of all query heads.
};
/// The token and query head of row `row` of the item's tile.
__device__ inline RowPlace place_of_row(const Work& w, const Item& item, int row) {
  if (row >= item.num_rows()) return {};
  const Divider by = item.num_heads == w.tiling.heads ? w.by_heads : w.by_last_heads;
  const auto token = static_cast<int>(divide(static_cast<std::uint32_t>(row), by));
  return {true, item.first_token + token, item.first_head + row - token * item.num_heads};
}

/// Element offset of a row of the item's in q or the output.
__device__ inline std::int64_t row_offset(const TokenLayout& layout, const Item& item,
                                          const RowPlace& place) {
  const std::int64_t before =
      layout.ragged ? item.begin_token * layout.token_stride : item.b * layout.batch_stride;
  return before + place.token * layout.token_stride + place.head * layout.head_stride;
}

__device__ inline std::int64_t partial_row(const Item& item, const RowPlace& place) {
  return item.partial_base + std::int64_t{place.token - item.first_token} * item.token_step +
         (place.head - item.first_head) * item.head_step;
}

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

/// Sums of a row over parts; a lane has kVector dims of each kStep.
template <typename ConfigT>
struct RowSums {
  static constexpr int kVector = ConfigT::kDimV / kLanes < 4 ? 2 : 4;
  static constexpr int kStep = kVector * kLanes;
  static constexpr int kVectors = ConfigT::kDimV / kStep;

  RowStats stats = {-INFINITY, 0.0F};
  float values[kVectors][kVector] = {};
};

/// To the output and the LSE, by a warp; `row` of the item's tile.
template <typename T, typename ConfigT>
__device__ void write_row(const Work& w, const Item& item, int row, const RowSums<ConfigT>& sums) {
  using Sums = RowSums<ConfigT>;
  const AttendParams& a = w.attend;
  const int lane = lane_of_thread();
  const RowPlace place = place_of_row(w, item, row);
  const float factor = factor_of(a, place.head, sums.stats);
  const std::int64_t to = row_offset(a.out_layout, item, place);
#pragma unroll
  for (int v = 0; v < Sums::kVectors; ++v) {
    const int dim = v * Sums::kStep + lane * Sums::kVector;
    if (dim >= a.head_dim_v) break;
#pragma unroll
    for (int e = 0; e < Sums::kVector; e += 2) {
      const float low = sums.values[v][e] * factor;
      const float high = sums.values[v][e + 1] * factor;
      if (w.out_in_vectors) {
        *reinterpret_cast<std::uint32_t*>(static_cast<T*>(a.out) + to + dim + e) =
            cuda::pack_pair<T>(low, high);
      } else {
        cuda::store_element(a.out, a.out_dtype, to + dim + e, low);
        cuda::store_element(a.out, a.out_dtype, to + dim + e + 1, high);
      }
    }
  }
  if (lane == 0) write_lse(a, item.begin_token + place.token, place.head, sums.stats);
}

/// Adds parts of rows row, row + kWarps … of a piece, kAtOnce at most and before end_row, in their
/// order, by a warp: to the output, or in place of the first of them. Code that is new to the
/// multiprocessor costs more than what it does, so that loops stay short; so do loads that wait for
/// each other, hence several rows.
template <typename T, typename ConfigT, int kAtOnce>
__device__ void add_parts(const Work& w, const Item& item, PartRun run, bool to_output, int row,
                          int end_row) {
  using Sums = RowSums<ConfigT>;
  const int lane = lane_of_thread();
  const auto place_of = [&](std::int32_t i, int n) {
    const int at = min(row + n * ConfigT::kWarps, end_row - 1);
    return w.slot_partials + partial_of(item.sharing, run.first + i * run.step) * w.slot_rows + at;
  };
  Sums sums[kAtOnce];
#pragma unroll 1
  for (std::int32_t first = 0; first < run.count; first += kLanes) {
    const std::int32_t count = min(run.count - first, kLanes);
    float shares[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      float2 stats = {-INFINITY, 0.0F};
      if (lane < count)
        stats = __ldcg(reinterpret_cast<const float2*>(w.stats + place_of(first + lane, n)));
      float max = fmaxf(sums[n].stats.max, stats.x);
#pragma unroll
      for (int apart = 1; apart < kLanes; apart *= 2)
        max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, apart));
      const float base = max == -INFINITY ? 0.0F : max;
      const float kept = cuda::fast_exp2(sums[n].stats.max - base);
      shares[n] = cuda::fast_exp2(stats.x - base);
      float sum = stats.y * shares[n];
#pragma unroll
      for (int apart = 1; apart < kLanes; apart *= 2) sum += __shfl_xor_sync(kAllLanes, sum, apart);
      sums[n].stats = {max, sums[n].stats.sum * kept + sum};
#pragma unroll
      for (auto& values : sums[n].values) {
        for (float& value : values) value *= kept;
      }
    }
    constexpr int kOfAll = Sums::kVectors * Sums::kVector * kAtOnce;
#pragma unroll(kOfAll <= 4 ? 8 : kOfAll <= 16 ? 4 : 2)
    for (std::int32_t i = 0; i < count; ++i) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const float share = __shfl_sync(kAllLanes, shares[n], i);
        const float* from =
            w.partials + place_of(first + i, n) * ConfigT::kDimV + lane * Sums::kVector;
#pragma unroll
        for (int v = 0; v < Sums::kVectors; ++v) {
          float values[Sums::kVector];
          read_sums(from + v * Sums::kStep, values);
#pragma unroll
          for (int e = 0; e < Sums::kVector; ++e) sums[n].values[v][e] += values[e] * share;
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    const int at = row + n * ConfigT::kWarps;
    if (at >= end_row) break;
    if (to_output) {
      write_row<T, ConfigT>(w, item, at, sums[n]);
      continue;
    }
    const std::int64_t place = place_of(0, n);
    float* to = w.partials + place * ConfigT::kDimV + lane * Sums::kVector;
#pragma unroll
    for (int v = 0; v < Sums::kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < Sums::kVector; ++e) to[v * Sums::kStep + e] = sums[n].values[v][e];
    }
    if (lane == 0) w.stats[place] = sums[n].stats;
  }
}

/// The same for all rows, by all threads.
template <typename T, typename ConfigT>
__device__ void add_rows(const Work& w, const Item& item, PartRun run, bool to_output) {
  const int rows = item.num_rows();
  const int first_row = warp_of_thread();
  constexpr int kMany = ConfigT::kDimV <= 256 ? 4 : 2;
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
template <typename ConfigT>
__device__ bool arrives_last(std::uint32_t* arrived, std::int32_t blocks,
                             BlockState<ConfigT>& state) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // for what all threads of the block wrote
    const std::uint32_t before = atomicAdd(arrived, 1U);
    state.is_last = before + 1 == static_cast<std::uint32_t>(blocks);
    if (state.is_last) {
      *arrived = 0;
      __threadfence();
    }
  }
  __syncthreads();
  return state.is_last;
}

/// The block's part of a piece is written; the last block to say so adds them all. Of parts that
/// are too much for one block those of a group are added first, by the last of its blocks.
template <typename T, typename ConfigT>
__device__ __noinline__ void share_piece(const Work& w, BlockState<ConfigT>& state) {
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
      if (!arrives_last(arrived, run.count, state)) return;
      add_rows<T, ConfigT>(w, item, run, to_output);
    }
    if (to_output) return;
    to_output = true;
    run = {0, ceil_div_small(parts, group), group};
    arrived = counters + 1;  // no group's
  }
}

}  // namespace octavo::kernels::flash2
