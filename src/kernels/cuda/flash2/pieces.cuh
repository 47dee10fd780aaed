// SPDX-License-Identifier: Apache-2.0
// A block's way through its items, and where their rows lie.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/tensor_core.cuh"
#include "kernels/cuda/flash2/item.cuh"
#include "kernels/cuda/flash2/ring.cuh"

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
  bool has_more;                             ///< Items after this one.
  RowSpan spans[ConfigT::kWarps];            ///< Where rows are dealt to warps.
  std::int64_t row_offsets[ConfigT::kRows];  ///< Of the item's rows, in q or where they go to.
  Ring<ConfigT> ring;
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
    if constexpr (!ConfigT::kFew) {
      __syncwarp();  // what all lanes read at once of the state is the first one's
      finish_item(w, state);
    }
    if constexpr (ConfigT::kDrifts) {
      if (threadIdx.x == 0) state.ring.init();
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

}  // namespace octavo::kernels::flash2
