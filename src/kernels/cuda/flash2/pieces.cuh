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
  bool is_last;
  std::int64_t row_offsets[ConfigT::kRows];  ///< Of the item's rows, in q or where they go to.
};

/// By all threads. Items and slots take turns in proportion, so that the arithmetic of prompts and
/// the loads of decodes meet on each multiprocessor; of the items the last come first: under a
/// causal mask they are the longest of a sequence.
template <typename ConfigT>
__device__ void first_item(const Work& w, BlockState<ConfigT>& state) {
  if (threadIdx.x < kLanes) {
    const Slots slots = w.max_slots > 0 ? SlotWalk::slots(w) : Slots{};
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
      walk = SlotWalk(w, slots, own_slot);
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
    }
  }
  __syncthreads();
}

/// By all threads; what the last item left in shared memory is gone.
template <typename ConfigT>
__device__ void next_item(const Work& w, BlockState<ConfigT>& state) {
  __syncthreads();
  if (threadIdx.x < kLanes) {
    SlotWalk walk = state.walk;
    const bool has_item = state.slot >= 0 && !walk.done();
    Item item;
    if (has_item) item = walk.next(w, state.slot);
    __syncwarp();
    if (threadIdx.x == 0) {
      state.item = item;
      state.walk = walk;
      state.has_item = has_item;
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

/// Rows first_row … end_row - 1 of a piece: what each part's share of the row is, by a warp a row;
/// `shares` [rows, parts] and `factors` [rows] are in shared memory.
template <typename ConfigT>
__device__ void share_out(const Work& w, const Item& item, int first_row, int end_row,
                          float* shares, float* factors) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int32_t parts = item.sharing.num_parts;
#pragma unroll 1
  for (int row = first_row + static_cast<int>(threadIdx.x) / kLanes; row < end_row;
       row += ConfigT::kWarps) {
    float* own = shares + (row - first_row) * parts;
    const auto stats_of = [&](std::int32_t part) {
      const std::int64_t at = w.slot_partials + partial_of(item.sharing, part) * w.slot_rows + row;
      return __ldcg(reinterpret_cast<const float2*>(w.stats + at));
    };
    float max = -INFINITY;
    for (std::int32_t part = lane; part < parts; part += kLanes) max = fmaxf(max, stats_of(part).x);
#pragma unroll
    for (int apart = 1; apart < kLanes; apart *= 2)
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, apart));
    const float base = max == -INFINITY ? 0.0F : max;
    float sum = 0.0F;
    for (std::int32_t part = lane; part < parts; part += kLanes) {
      const float2 stats = stats_of(part);
      const float share = cuda::fast_exp2(stats.x - base);
      own[part] = share;
      sum += stats.y * share;
    }
#pragma unroll
    for (int apart = 1; apart < kLanes; apart *= 2) sum += __shfl_xor_sync(kAllLanes, sum, apart);
    if (lane == 0) {
      const RowPlace place = place_of_row(w, item, row);
      write_lse(w.attend, item.b, place.token, place.head, {max, sum});
      factors[row - first_row] = factor_of(w.attend, place.head, {max, sum});
    }
  }
}

/// Adds the parts of a row, four dims from `dim` on, to the output, in their order.
template <typename ConfigT>
__device__ void add_parts(const Work& w, const Item& item, int row, int dim, const float* shares,
                          float factor) {
  const AttendParams& a = w.attend;
  const std::int32_t parts = item.sharing.num_parts;
  float out[4] = {};
#pragma unroll 8
  for (std::int32_t part = 0; part < parts; ++part) {
    const std::int64_t at = w.slot_partials + partial_of(item.sharing, part) * w.slot_rows + row;
    const float4 values =
        __ldcg(reinterpret_cast<const float4*>(w.partials + at * ConfigT::kDimV + dim));
    const float share = shares[part];
    out[0] += values.x * share;
    out[1] += values.y * share;
    out[2] += values.z * share;
    out[3] += values.w * share;
  }
  const RowPlace place = place_of_row(w, item, row);
  const std::int64_t to = cuda::token_offset(a.out_layout, a.batch, item.b, place.token) +
                          place.head * a.out_layout.head_stride + dim;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (dim + e < a.head_dim_v) cuda::store_element(a.out, a.out_dtype, to + e, out[e] * factor);
  }
}

/// The block's part of a piece is written; the last block to say so adds them all.
template <typename ConfigT>
__device__ __noinline__ void share_piece(const Work& w, BlockState<ConfigT>& state,
                                         unsigned char* smem) {
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
  constexpr int kChunks = ConfigT::kDimV / 4;
  constexpr int kRoom = ConfigT::kSmemBytes / static_cast<int>(sizeof(float)) - ConfigT::kRows;
  auto* factors = reinterpret_cast<float*>(smem);
  float* shares = factors + ConfigT::kRows;
  const int rows_at_once = min(kRoom / item.sharing.num_parts, item.num_rows());
#pragma unroll 1
  for (int first_row = 0; first_row < item.num_rows(); first_row += rows_at_once) {
    const int end_row = min(first_row + rows_at_once, item.num_rows());
    __syncthreads();
    share_out<ConfigT>(w, item, first_row, end_row, shares, factors);
    __syncthreads();
    const int work = (end_row - first_row) * kChunks;
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x); c < work; c += ConfigT::kThreads) {
      const int row = c / kChunks;
      const int dim = c % kChunks * 4;
      if (dim >= w.attend.head_dim_v) continue;
      add_parts<ConfigT>(w, item, first_row + row, dim, shares + row * item.sharing.num_parts,
                         factors[row]);
    }
  }
}

}  // namespace octavo::kernels::flash2
