// SPDX-License-Identifier: Apache-2.0
// A block's way through its items, and pieces of one sequence that several blocks share: the last
// of them to arrive adds all parts, in their order.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/flash2/item.cuh"

namespace octavo::kernels::flash2 {

/// What all threads of a block know, in shared memory.
struct BlockState {
  Item item;
  SlotWalk walk;
  std::int32_t slot;
  bool has_item;
  bool is_last;
};

/// By all threads. Items and slots take turns in proportion, so that the arithmetic of prompts and
/// the loads of decodes meet on each multiprocessor; of the items the last come first: under a
/// causal mask they are the longest of a sequence.
template <typename ConfigT>
__device__ void first_item(const Work& w, BlockState& state) {
  if (threadIdx.x < kLanes) {
    const Slots slots = w.max_slots > 0 ? SlotWalk::slots(w) : Slots{};
    std::int64_t items = 0;
    if (!ConfigT::kFew && w.max_items > 0)
      items = w.cut.item_offsets[w.attend.batch.num_seqs] * w.shape.head_tiles;
    const std::int64_t all = items + slots.count;
    const std::int64_t block = blockIdx.x;
    std::int64_t slot = block;
    std::int64_t slots_upto = block + 1;
    if (items > 0 && block < all) {
      slot = block * slots.count / all;
      slots_upto = (block + 1) * slots.count / all;
    }
    bool has_item = block < all;
    SlotWalk walk;
    Item item;
    std::int32_t own_slot = -1;
    if (has_item && slots_upto > slot) {
      own_slot = static_cast<std::int32_t>(slot);
      walk = SlotWalk(w, slots, own_slot);
      has_item = !walk.done();
      if (has_item) item = walk.next(w, own_slot);
    } else if (!ConfigT::kFew && has_item) {
      item = cut_item(w, items - 1 - (block - slot));
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
__device__ inline void next_item(const Work& w, BlockState& state) {
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

/// Adds the parts of row `row`, four dims from `dim` on, to the output.
template <typename ConfigT>
__device__ void add_parts(const Work& w, const Item& item, int row, int dim) {
  const AttendParams& a = w.attend;
  const auto at = [&](std::int32_t part) {
    return w.slot_partials + partial_of(item.sharing, part) * w.slot_rows + row;
  };
  const auto stats_of = [&](std::int32_t part) {
    const float2 bits = __ldcg(reinterpret_cast<const float2*>(w.stats + at(part)));
    return RowStats{bits.x, bits.y};
  };
  const std::int32_t parts = item.sharing.num_parts;
  float max = -INFINITY;
#pragma unroll 8
  for (std::int32_t part = 0; part < parts; ++part) max = fmaxf(max, stats_of(part).max);
  const float base = max == -INFINITY ? 0.0F : max;
  RowStats sums{max, 0.0F};
  float out[4] = {};
#pragma unroll 8
  for (std::int32_t part = 0; part < parts; ++part) {
    const RowStats own = stats_of(part);
    const float4 values =
        __ldcg(reinterpret_cast<const float4*>(w.partials + at(part) * ConfigT::kDim + dim));
    if (own.sum == 0.0F) continue;  // saw no key: its row was not written
    const float share = exp2f(own.max - base);
    sums.sum += own.sum * share;
    out[0] += values.x * share;
    out[1] += values.y * share;
    out[2] += values.z * share;
    out[3] += values.w * share;
  }
  const RowPlace place = place_of_row(w, item, row);
  if (dim == 0) write_lse(a, item.b, place.token, place.head, sums);
  const float factor = factor_of(a, place.head, sums);
  const std::int64_t to = cuda::token_offset(a.out_layout, a.batch, item.b, place.token) +
                          place.head * a.out_layout.head_stride + dim;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (dim + e < a.head_dim_v) cuda::store_element(a.out, a.out_dtype, to + e, out[e] * factor);
  }
}

/// The block's part of a piece is written; the last block to say so adds them all.
template <typename ConfigT>
__device__ __noinline__ void share_piece(const Work& w, BlockState& state) {
  const Item& item = state.item;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    std::uint32_t* arrived = w.arrived + item.sharing.first_slot;
    const std::uint32_t before = atomicAdd(arrived, 1U);
    state.is_last = before + 1 == static_cast<std::uint32_t>(item.sharing.num_parts);
    if (state.is_last) *arrived = 0;  // for the next call
  }
  __syncthreads();
  if (!state.is_last) return;
  __threadfence();
  constexpr int kChunks = ConfigT::kDim / 4;
  const int work = item.num_rows() * kChunks;
  for (int c = static_cast<int>(threadIdx.x); c < work; c += ConfigT::kThreads) {
    if (c % kChunks * 4 < w.attend.head_dim_v)
      add_parts<ConfigT>(w, item, c / kChunks, c % kChunks * 4);
  }
}

}  // namespace octavo::kernels::flash2
