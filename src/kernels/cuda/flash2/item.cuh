// SPDX-License-Identifier: Apache-2.0
// What a block works on: an item of the cut, or the pieces of sequences that lie in its slot.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/step.cuh"
#include "kernels/cuda/flash2/finish.cuh"
#include "kernels/cuda/flash2/work.h"

namespace octavo::kernels::flash2 {

using cuda::kAllLanes;

/// Unsigned before they are numbers: what is divided by powers of two is then known to be positive.
__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x % kLanes); }
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x / kLanes); }
/// threadIdx.x, though the compiler doesn't know: what follows from that alone it would find once
/// and keep from item to item, where registers are short.
__device__ inline int thread_of_item() {
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return static_cast<int>(thread % 1024);
}

/// Tokens first_token … of batch row b, heads first_head … of a KV head, over key tiles
/// [first_tile, end_tile). Lives in shared memory: all threads of a block have the same.
struct alignas(16) Item {
  /// Head kv_head of slot 0 of page 0, of K and of V.
  const char* k_head = nullptr;
  const char* v_head = nullptr;
  KeySpan keys;                  ///< That any of the tokens sees; tiles of this item alone.
  std::int32_t whole_begin = 0;  ///< Keys that all of the tokens see.
  std::int32_t whole_end = 0;
  const std::int32_t* pages = nullptr;  ///< The sequence's row of the page table.
  std::int32_t row = 0;                 ///< Without a page table the page.
  std::int32_t b = 0;
  std::int32_t begin_token = 0;  ///< Of the sequence's new ones, among those of the step.
  std::int32_t first_token = 0;
  std::int32_t num_tokens = 0;
  std::int32_t first_head = 0;
  std::int32_t num_heads = 0;
  std::int32_t first_position = 0;  ///< Of first_token.
  std::int32_t kv_len = 0;
  /// Where its partial results go: row partial_base + token * token_step + head * head_step, token
  /// and head counted from the item's first ones. Negative: it has all keys, and gives outputs.
  std::int64_t partial_base = -1;
  std::int32_t token_step = 0;
  std::int32_t head_step = 0;
  Sharing sharing;  ///< Of a piece.

  [[nodiscard]] __device__ int num_rows() const { return num_tokens * num_heads; }
};

/// Whether some token of the item doesn't see some of `count` keys.
__device__ inline bool is_masked(const Item& item, int first_key, int count) {
  return first_key < item.whole_begin || first_key + count > item.whole_end;
}

/// The fields that follow from the tokens.
__device__ inline void set_keys(const Work& w, std::int32_t new_tokens, Item& item) {
  item.first_position = item.kv_len - new_tokens + item.first_token;
  item.keys = keys_seen(w.shape, new_tokens, item.kv_len, item.first_token, item.num_tokens);
  item.whole_begin = w.shape.reach.begin(item.first_position + item.num_tokens - 1);
  item.whole_end = w.shape.reach.end(item.first_position, item.kv_len);
}

__device__ inline std::int32_t row_of(const StepBatch& batch, std::int32_t b) {
  return batch.rows != nullptr ? batch.rows[b] : b;
}

/// The fields that follow from the heads, and from the row.
__device__ inline void set_heads(const Work& w, std::int32_t head_tile, Item& item) {
  const AttendParams& a = w.attend;
  std::int32_t first = 0;
  std::int32_t kv_head = head_tile;
  if (w.tiling.tiles_per_group > 1) {
    kv_head = head_tile / w.tiling.tiles_per_group;
    first = (head_tile - kv_head * w.tiling.tiles_per_group) * w.tiling.heads;
  }
  item.first_head = kv_head * w.tiling.group + first;
  item.num_heads = min(w.tiling.heads, w.tiling.group - first);
  const auto head_of = [&](const PagedTensor& tensor) {
    return static_cast<const char*>(tensor.data) + kv_head * tensor.head_stride * 2;
  };
  item.k_head = head_of(a.kv.k);
  item.v_head = head_of(a.kv.v);
  if (a.batch.page_table != nullptr)
    item.pages = a.batch.page_table + item.row * a.batch.page_table_stride;
}

/// The last b with offsets[b] <= value, found by a warp; offsets[0] <= value < offsets[n].
__device__ inline std::int32_t last_begun(const std::int64_t* offsets, std::int32_t n,
                                          std::int64_t value) {
  const int lane = lane_of_thread();
  std::int32_t low = 0;
  std::int32_t span = n;
  while (span > 1) {
    const std::int32_t step = (span + kLanes - 1) / kLanes;
    const std::int32_t at = lane * step;
    const bool begun = at < span && offsets[low + at] <= value;
    const std::int32_t last = __popc(__ballot_sync(kAllLanes, begun)) - 1;
    low += last * step;
    span = min(step, span - last * step);
  }
  return low;
}

/// What a lane knows of a sequence that makes items.
struct CutRow {
  std::uint32_t first_item = 0;
  std::int32_t begin_token = 0;
  std::int32_t end_token = 0;
  std::int32_t kv_len = 0;
  std::int32_t splits = 1;
  std::int32_t split_tiles = 1;
};
__device__ inline CutRow cut_row(const Work& w, std::int32_t b) {
  const StepBatch& batch = w.attend.batch;
  return {static_cast<std::uint32_t>(w.cut.item_offsets[b]),
          batch.token_offsets[b],
          batch.token_offsets[b + 1],
          batch.kv_lens[b],
          w.cut.num_splits[b],
          w.cut.split_tiles[b]};
}
/// To all lanes what lane `from` has.
__device__ inline CutRow shared_row(const CutRow& row, int from) {
  const auto of = [&](std::int32_t value) { return __shfl_sync(kAllLanes, value, from); };
  return {__shfl_sync(kAllLanes, row.first_item, from),
          of(row.begin_token),
          of(row.end_token),
          of(row.kv_len),
          of(row.splits),
          of(row.split_tiles)};
}

/// Item `index` of the step's, `items` a head tile; a warp's work. Items of one head tile lie side
/// by side, so that blocks at work together share its keys. `row` is what the lane knows of the
/// sequence of its number, so that with up to 32 of them no load waits for another.
__device__ inline Item cut_item(const Work& w, std::uint32_t index, std::uint32_t items,
                                CutRow row) {
  const AttendParams& a = w.attend;
  const std::uint32_t head_tile = index / items;
  const std::uint32_t within_heads = index - head_tile * items;
  Item item;
  if (a.batch.num_seqs <= kLanes) {
    const int lane = lane_of_thread();
    const bool begun = lane < a.batch.num_seqs && row.first_item <= within_heads;
    item.b = __popc(__ballot_sync(kAllLanes, begun)) - 1;
    row = shared_row(row, item.b);
  } else {
    item.b = last_begun(w.cut.item_offsets, a.batch.num_seqs, within_heads);
    row = cut_row(w, item.b);
  }
  const auto within = static_cast<std::int32_t>(within_heads - row.first_item);
  const std::int32_t new_tokens = row.end_token - row.begin_token;
  const std::int32_t q_tile = row.splits == 1 ? within : div_small(within, row.splits);
  const std::int32_t split = within - q_tile * row.splits;
  item.begin_token = row.begin_token;
  item.first_token = q_tile * w.tiling.q_tile;
  item.num_tokens = min(w.tiling.q_tile, new_tokens - item.first_token);
  item.kv_len = row.kv_len;
  item.row = row_of(a.batch, item.b);
  set_heads(w, static_cast<std::int32_t>(head_tile), item);
  set_keys(w, new_tokens, item);
  item.keys.first_tile = min(item.keys.first_tile + split * row.split_tiles, item.keys.end_tile);
  if (split + 1 < row.splits)
    item.keys.end_tile = min(item.keys.first_tile + row.split_tiles, item.keys.end_tile);
  if (row.splits > 1) {
    const std::int64_t first =
        w.cut.partial_offsets[item.b] + std::int64_t{item.first_token} * row.splits + split;
    item.partial_base = first * a.num_q_heads + item.first_head;
    item.token_step = row.splits * a.num_q_heads;
    item.head_step = 1;
  }
  return item;
}

/// What a lane knows of a sequence.
struct RowLengths {
  std::int32_t begin_token = 0;
  std::int32_t new_tokens = 0;
  std::int32_t kv_len = 0;
  std::int32_t row = 0;  ///< Of the page table.
  std::int32_t units = 0;
};
__device__ inline RowLengths lengths_of_row(const Work& w, std::int32_t b) {
  const StepBatch& batch = w.attend.batch;
  if (b >= batch.num_seqs) return {};
  RowLengths row{batch.token_offsets[b], 0, batch.kv_lens[b], row_of(batch, b)};
  row.new_tokens = batch.token_offsets[b + 1] - row.begin_token;
  row.units = units_of(w.shape, row.new_tokens, row.kv_len);
  return row;
}

/// How the step's units are cut, by a warp. `first`: what is known of row `lane`.
__device__ inline Slots slots_of_step(const Work& w, const RowLengths& first) {
  std::int32_t units = first.units;
  std::int32_t most = units;
  auto fewest = static_cast<std::uint32_t>(units) - 1;  // of those that have some, less 1
#pragma unroll 1
  for (std::int32_t b = lane_of_thread() + kLanes; b < w.attend.batch.num_seqs; b += kLanes) {
    const std::int32_t own = lengths_of_row(w, b).units;
    units += own;
    most = max(most, own);
    fewest = min(fewest, static_cast<std::uint32_t>(own) - 1);
  }
  units = __reduce_add_sync(kAllLanes, units);
  most = __reduce_max_sync(kAllLanes, most);
  fewest = __reduce_min_sync(kAllLanes, fewest);
  const bool equal = fewest + 1 == static_cast<std::uint32_t>(most);
  return slots_of(units * w.shape.head_tiles, w.by_most_slots, equal ? most : 0);
}

/// value / by, of less than 2^20: the guess is off by less than one. What a processor without a
/// division of integers does for any two of them takes twice as long.
__device__ inline std::int32_t small_quotient(std::int32_t value, std::int32_t by) {
  const float guess = static_cast<float>(value) * cuda::fast_reciprocal(static_cast<float>(by));
  auto quotient = static_cast<std::int32_t>(guess);
  const std::int32_t rest = value - quotient * by;
  if (rest < 0) --quotient;
  if (rest >= by) ++quotient;
  return quotient;
}

/// Goes through the pieces of a slot; a warp's work. Of a piece first what its loads need is found,
/// in begin(), and the rest while they are on their way, in finish().
class SlotWalk {
 public:
  SlotWalk() = default;
  __device__ SlotWalk(const Slots& slots, std::int32_t slot)
      : run_(slots.run), at_(slot * slots.run), end_(min(at_ + slots.run, slots.units)) {}

  [[nodiscard]] __device__ bool done() const { return at_ >= end_; }

  /// The first piece; not when done. `rows`: what is known of row `lane`.
  __device__ void begin(const Work& w, const RowLengths& rows, Item& item) {
    find(w, 0, rows, 0, item);
    begin_piece(w, item);
  }

  /// The piece behind that of `item`; not when done.
  __device__ void next(const Work& w, Item& item) {
    if (at_ == row_begin_ + units_ * w.shape.head_tiles) {
      const std::int32_t first = item.b + 1;
      find(w, first, lengths_of_row(w, first + lane_of_thread()),
           div_small(at_, w.shape.head_tiles), item);
    }
    begin_piece(w, item);
  }

  /// How the piece is shared, and where its partial results go.
  __device__ void finish(const Work& w, std::int32_t slot, Item& item) {
    const std::int32_t end = begin_ + units_;
    item.sharing = sharing_of(begin_, end, run_);
    item.partial_base = -1;
    if (item.sharing.num_parts > 1) {
      item.partial_base =
          w.slot_partials + partial_of(item.sharing, slot - item.sharing.first_slot) * w.slot_rows;
    }
    item.token_step = item.num_heads;
    item.head_step = 1;
    at_ = min(end, end_);
  }

 private:
  /// Looks for the sequence of unit at_ among rows from `first` on, `row` the lane's of the first
  /// 32; `before` are the units of one head tile in front of them.
  __device__ void find(const Work& w, std::int32_t first, RowLengths row, std::int32_t before,
                       Item& item) {
    std::int32_t up_to = 0;
    std::uint32_t beyond = 0;
    while (true) {
      up_to = before + cuda::sum_up_to_lane(row.units);
      beyond = __ballot_sync(kAllLanes, up_to * w.shape.head_tiles > at_);
      if (beyond != 0) break;
      before = __shfl_sync(kAllLanes, up_to, kLanes - 1);
      first += kLanes;
      row = lengths_of_row(w, first + lane_of_thread());
    }
    const int found = __ffs(static_cast<int>(beyond)) - 1;
    const auto of = [&](std::int32_t value) { return __shfl_sync(kAllLanes, value, found); };
    units_ = of(row.units);
    row_begin_ = (of(up_to) - units_) * w.shape.head_tiles;
    item.b = first + found;
    item.row = of(row.row);
    item.begin_token = of(row.begin_token);
    item.num_tokens = of(row.new_tokens);
    item.kv_len = of(row.kv_len);
  }

  __device__ void begin_piece(const Work& w, Item& item) {
    const std::int32_t head_tile = small_quotient(at_ - row_begin_, units_);
    begin_ = row_begin_ + head_tile * units_;
    set_heads(w, head_tile, item);
    set_keys(w, item.num_tokens, item);
    item.keys.end_tile = min(item.keys.end_tile, item.keys.first_tile + min(units_, end_ - begin_));
    item.keys.first_tile += at_ - begin_;
  }

  std::int32_t run_ = 1;
  std::int32_t at_ = 0;  ///< Unit.
  std::int32_t end_ = 0;
  std::int32_t units_ = 1;      ///< Of one head tile of the sequence.
  std::int32_t row_begin_ = 0;  ///< Its first unit,
  std::int32_t begin_ = 0;      ///< and that of the head tile.
};

}  // namespace octavo::kernels::flash2
