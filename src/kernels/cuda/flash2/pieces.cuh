// SPDX-License-Identifier: Apache-2.0
// A block's way through its items, and pieces of one sequence that several blocks share: the last
// of them to arrive adds all parts, in their order.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/tensor_core.cuh"
#include "kernels/cuda/flash2/item.cuh"

namespace octavo::kernels::flash2 {

/// What all threads of a block know, in shared memory.
template <typename ConfigT>
struct BlockState {
  Item item;
  SlotWalk walk;
  std::int32_t slot;
  bool has_item;
  bool has_more;  ///< Items after this one.
  bool is_last;
  std::int64_t row_offsets[ConfigT::kRows];  ///< Of the item's rows, in q or where they go to.
};

/// By all threads. Items and slots take turns in proportion, so that the arithmetic of prompts and
/// the loads of decodes meet on each multiprocessor; of the items the last come first: under a
/// causal mask they are the longest of a sequence.
template <typename ConfigT>
__device__ void first_item(const Work& w, BlockState<ConfigT>& state) {
  if (threadIdx.x < kLanes) {
    RowLengths row;
    const Slots slots = w.max_slots > 0 ? SlotWalk::slots(w, row) : Slots{};
    const auto count = static_cast<std::uint32_t>(slots.count);
    std::uint32_t items = 0;  // of a head tile
    if (!ConfigT::kFew && w.max_items > 0)
      items = static_cast<std::uint32_t>(w.cut.item_offsets[w.attend.batch.num_seqs]);
    const std::uint32_t all_items = items * static_cast<std::uint32_t>(w.shape.head_tiles);
    const std::uint32_t block = blockIdx.x;
    bool has_item = block < all_items + count;
    // How many slots come before this block, and before the next.
    std::uint32_t slot = all_items == 0 ? block : 0;
    std::uint32_t slots_upto = all_items == 0 ? block + 1 : 0;
    if (all_items > 0 && count > 0) {
      const std::uint64_t all = all_items + count;
      slot = static_cast<std::uint32_t>(std::uint64_t{block} * count / all);
      slots_upto = static_cast<std::uint32_t>((std::uint64_t{block} + 1) * count / all);
    }
    SlotWalk walk;
    Item item;
    std::int32_t own_slot = -1;
    if (has_item && slots_upto > slot) {
      own_slot = static_cast<std::int32_t>(slot);
      walk = SlotWalk(w, slots, own_slot, row);
      has_item = !walk.done();
      if (has_item) item = walk.next(w, own_slot);
    } else if (!ConfigT::kFew && has_item) {
      item = cut_item(w, all_items - 1 - (block - slot), items);
    }
    if (threadIdx.x == 0) {
      state.item = item;
      state.walk = walk;
      state.slot = own_slot;
      state.has_item = has_item;
      state.has_more = has_item && own_slot >= 0 && !walk.done();
    }
  }
  __syncthreads();
}

/// By all threads, where there is one more; what the last item left in shared memory is gone.
template <typename ConfigT>
__device__ void next_item(const Work& w, BlockState<ConfigT>& state) {
  __syncthreads();
  if (threadIdx.x < kLanes) {
    SlotWalk walk = state.walk;
    const Item item = walk.next(w, state.slot);
    __syncwarp();
    if (threadIdx.x == 0) {
      state.item = item;
      state.walk = walk;
      state.has_more = !walk.done();
    }
  }
  __syncthreads();
}

struct RowPlace {
  bool exists = false;
  std::int32_t token = 0;  ///< Of the sequence's new ones.
  std::int32_t head = 0;
};
/// The token and query head of row `row` of the item's tile.
__device__ inline RowPlace place_of_row(const Work& w, const Item& item, int row) {
  if (row >= item.num_rows()) return {};
  int token = row;
  if (item.num_heads == w.tiling.heads) {
    token = static_cast<int>(divide(static_cast<std::uint32_t>(row), w.by_heads));
  } else {
    token = row / item.num_heads;  // the last tile of a wide group
  }
  return {true, item.first_token + token, item.first_head + row - token * item.num_heads};
}

__device__ inline std::int64_t partial_row(const Item& item, const RowPlace& place) {
  return item.partial_base + std::int64_t{place.token - item.first_token} * item.token_step +
         (place.head - item.first_head) * item.head_step;
}

/// Adds the parts of rows row, row + kWarps … of a piece, kAtOnce at most and before end_row, in
/// their order, to the output; by a warp. Code that is new to the multiprocessor costs more than
/// what it does, so that loops stay short; so do loads that wait for each other, hence several
/// rows.
template <typename T, typename ConfigT, int kAtOnce>
__device__ void add_parts(const Work& w, const Item& item, int row, int end_row) {
  constexpr int kLaneDims = ConfigT::kDimV / kLanes;  // dims of a lane
  const AttendParams& a = w.attend;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int32_t parts = item.sharing.num_parts;
  const auto place_of_part = [&](std::int32_t part, int n) {
    const int at = min(row + n * ConfigT::kWarps, end_row - 1);
    return w.slot_partials + partial_of(item.sharing, part) * w.slot_rows + at;
  };
  RowStats sums[kAtOnce];
  float out[kAtOnce][kLaneDims] = {};
#pragma unroll
  for (RowStats& sum : sums) sum = {-INFINITY, 0.0F};
#pragma unroll 1
  for (std::int32_t first = 0; first < parts; first += kLanes) {
    const std::int32_t count = min(parts - first, kLanes);
    float shares[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      float2 stats = {-INFINITY, 0.0F};
      if (lane < count)
        stats = __ldcg(reinterpret_cast<const float2*>(w.stats + place_of_part(first + lane, n)));
      float max = fmaxf(sums[n].max, stats.x);
#pragma unroll
      for (int apart = 1; apart < kLanes; apart *= 2)
        max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, apart));
      const float base = max == -INFINITY ? 0.0F : max;
      const float kept = cuda::fast_exp2(sums[n].max - base);
      shares[n] = cuda::fast_exp2(stats.x - base);
      float sum = stats.y * shares[n];
#pragma unroll
      for (int apart = 1; apart < kLanes; apart *= 2) sum += __shfl_xor_sync(kAllLanes, sum, apart);
      sums[n] = {max, sums[n].sum * kept + sum};
#pragma unroll
      for (float& value : out[n]) value *= kept;
    }
#pragma unroll(kLaneDims* kAtOnce <= 4 ? 8 : kLaneDims * kAtOnce <= 16 ? 4 : 2)
    for (std::int32_t i = 0; i < count; ++i) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const float share = __shfl_sync(kAllLanes, shares[n], i);
        const float* from =
            w.partials + place_of_part(first + i, n) * ConfigT::kDimV + lane * kLaneDims;
#pragma unroll
        for (int e = 0; e < kLaneDims; e += 2) {
          const float2 values = __ldcg(reinterpret_cast<const float2*>(from + e));
          out[n][e] += values.x * share;
          out[n][e + 1] += values.y * share;
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    const int at = row + n * ConfigT::kWarps;
    if (at >= end_row) break;
    const RowPlace place = place_of_row(w, item, at);
    const float factor = factor_of(a, place.head, sums[n]);
    const std::int64_t to = cuda::token_offset(a.out_layout, a.batch, item.b, place.token) +
                            place.head * a.out_layout.head_stride;
#pragma unroll
    for (int e = 0; e < kLaneDims; e += 2) {
      const int dim = lane * kLaneDims + e;
      if (dim >= a.head_dim_v) break;
      if (w.out_in_vectors) {
        *reinterpret_cast<std::uint32_t*>(static_cast<T*>(a.out) + to + dim) =
            cuda::pack_pair<T>(out[n][e] * factor, out[n][e + 1] * factor);
      } else {
        cuda::store_element(a.out, a.out_dtype, to + dim, out[n][e] * factor);
        cuda::store_element(a.out, a.out_dtype, to + dim + 1, out[n][e + 1] * factor);
      }
    }
    if (lane == 0) write_lse(a, item.b, place.token, place.head, sums[n]);
  }
}

/// The block's part of a piece is written; the last block to say so adds them all.
template <typename T, typename ConfigT>
__device__ __noinline__ void share_piece(const Work& w, BlockState<ConfigT>& state) {
  const Item& item = state.item;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // for what all threads of the block wrote
    std::uint32_t* arrived = w.arrived + item.sharing.first_slot;
    const std::uint32_t before = atomicAdd(arrived, 1U);
    state.is_last = before + 1 == static_cast<std::uint32_t>(item.sharing.num_parts);
    if (state.is_last) {
      *arrived = 0;  // for the next call
      __threadfence();
    }
  }
  __syncthreads();
  if (!state.is_last) return;
  const int rows = item.num_rows();
  const int first_row = static_cast<int>(threadIdx.x) / kLanes;
  constexpr int kMany = ConfigT::kDimV <= 256 ? 4 : 2;
  if (rows <= ConfigT::kWarps) {
    if (first_row < rows) add_parts<T, ConfigT, 1>(w, item, first_row, rows);
    return;
  }
#pragma unroll 1
  for (int row = first_row; row < rows; row += kMany * ConfigT::kWarps)
    add_parts<T, ConfigT, kMany>(w, item, row, rows);
}

}  // namespace octavo::kernels::flash2
