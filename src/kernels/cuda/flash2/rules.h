// SPDX-License-Identifier: Apache-2.0
// How a step is dealt to blocks: closed forms for one thread of a GPU or of a host, and what
// follows for a host that knows maxima alone. Compiles without CUDA.
//
// A sequence whose new tokens fit one tile (decode, drafts) is streamed: its key tiles, of all
// heads, are units of one line on which all such sequences lie one behind the other, and that line
// is cut into slots of equal length, a block each. A sequence of more tokens, and every sequence in
// batch-invariant mode, makes items: a q tile, or an even split of the keys of one.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cuda/flash2/config.h"
#include "kernels/params.h"

namespace octavo::kernels::flash2 {

/// Items that a step's sequences of several tiles are split to make, or one sequence in
/// batch-invariant mode.
inline constexpr std::int64_t kTargetItems = 256;
inline constexpr std::int64_t kInvariantTargetItems = 64;
/// Fewest key tiles of a split and of a slot.
inline constexpr std::int64_t kMinSplitTiles = 4;
inline constexpr std::int32_t kMinSlotTiles = 1;
inline constexpr std::int64_t kMostUnits = 0x40000000;
/// Most slots of a step, whatever the device.
inline constexpr std::int32_t kMaxSlots = 1024;

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t by) {
  return (value + by - 1) / by;
}
/// In 32 bits, unsigned: what a thread of a GPU does in a tenth of the time.
constexpr std::int32_t ceil_div_small(std::int32_t value, std::int32_t by) {
  return static_cast<std::int32_t>(
      (static_cast<std::uint32_t>(value) + static_cast<std::uint32_t>(by) - 1) /
      static_cast<std::uint32_t>(by));
}
constexpr std::int32_t div_small(std::int32_t value, std::int32_t by) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(value) /
                                   static_cast<std::uint32_t>(by));
}
constexpr std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t most(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

/// Division by a number that is known beforehand, of values below 2^31: value * multiplier, of
/// which the upper half is shifted. With l = ceil(log2(by)) the multiplier is 2^(31 + l) / by,
/// rounded up by less than one, so that the quotient is off by less than value / 2^31 of 1 / by.
struct Divider {
  std::uint32_t multiplier = 0;  ///< 0: by 1.
  std::uint32_t shift = 0;
};
constexpr Divider divider_of(std::uint32_t by) {
  if (by == 1) return {};
  std::uint32_t log = 1;
  while ((std::uint64_t{1} << log) < by) ++log;
  const std::uint64_t numerator = std::uint64_t{1} << (31 + log);
  return {static_cast<std::uint32_t>((numerator + by - 1) / by), log - 1};
}
constexpr std::uint32_t divide(std::uint32_t value, Divider by) {
  if (by.multiplier == 0) return value;
  return static_cast<std::uint32_t>((std::uint64_t{value} * by.multiplier) >> 32U) >> by.shift;
}

/// How query heads and tokens make tiles. A group of more heads than a tile has rows takes several.
struct Tiling {
  std::int32_t tiles_per_group = 1;
  std::int32_t group = 1;       ///< Query heads of a KV head.
  std::int32_t heads = 1;       ///< Of a tile; the last tile of a group may have fewer.
  std::int32_t q_tile = 1;      ///< Tokens of a tile.
  std::int32_t head_tiles = 1;  ///< Of all KV heads.
};
constexpr Tiling tiling_of(std::int32_t num_q_heads, std::int32_t num_kv_heads,
                           std::int32_t tile_rows) {
  Tiling tiling;
  tiling.group = num_q_heads / num_kv_heads;
  tiling.tiles_per_group = static_cast<std::int32_t>(ceil_div(tiling.group, tile_rows));
  tiling.heads = static_cast<std::int32_t>(ceil_div(tiling.group, tiling.tiles_per_group));
  tiling.q_tile = tile_rows / tiling.heads;
  tiling.head_tiles = num_kv_heads * tiling.tiles_per_group;
  return tiling;
}

/// Which keys a token sees, in 32 bits: as visible_keys, with what reaches everywhere made kFar.
struct Reach {
  static constexpr std::int32_t kFar = 0x7FFFFFFF;
  std::int32_t left = kFar;
  std::int32_t right = 0;

  /// A position is negative where a sequence has more new tokens than keys. No step of either sum
  /// leaves 32 bits, whichever way it goes: compilers make a maximum of a comparison and its
  /// difference, and wrong ones where the difference wraps.
  [[nodiscard]] constexpr std::int32_t begin(std::int32_t position) const {
    const std::int32_t from_start = position > 0 ? position : 0;
    return from_start > left ? from_start - left : 0;
  }
  [[nodiscard]] constexpr std::int32_t end(std::int32_t position, std::int32_t kv_len) const {
    const std::int32_t unseen = kv_len - position - 1 - right;
    if (unseen <= 0) return kv_len;
    return kv_len > unseen ? kv_len - unseen : 0;
  }
};
constexpr Reach reach_of(bool causal, std::int64_t window_left, std::int64_t window_right) {
  const auto clamped = [](std::int64_t window) {
    return static_cast<std::int32_t>(window < 0 ? Reach::kFar : least(window, Reach::kFar));
  };
  return {clamped(window_left), causal ? 0 : clamped(window_right)};
}

/// What the cut depends on beside the lengths.
struct CutShape {
  std::int32_t q_tile = 1;
  std::int32_t head_tiles = 1;
  std::int32_t tile_keys = 1;  ///< 2 to the power of log_tile_keys.
  std::int32_t log_tile_keys = 0;
  Reach reach;
  bool batch_invariant = false;
  bool streams = true;  ///< Whether there are slots; else all sequences make items.
};
/// Units are numbered in 32 bits; a step that might have more has no slots.
constexpr bool step_streams(const StepMaxima& maxima, std::int32_t head_tiles) {
  constexpr std::int32_t kFewestKeys = 16;  // of a tile
  return (maxima.max_kv_len / kFewestKeys + std::int64_t{1}) * maxima.num_seqs * head_tiles <
         kMostUnits;
}
constexpr CutShape cut_shape(const AttendParams& p, const Instance& instance,
                             const StepMaxima& maxima) {
  const Tiling tiling = tiling_of(p.num_q_heads, p.num_kv_heads, instance.rows);
  return {.q_tile = tiling.q_tile,
          .head_tiles = tiling.head_tiles,
          .tile_keys = instance.keys,
          .log_tile_keys = std::countr_zero(static_cast<std::uint32_t>(instance.keys)),
          .reach = reach_of(p.causal, p.window_left, p.window_right),
          .batch_invariant = p.batch_invariant,
          .streams = !p.batch_invariant && step_streams(maxima, tiling.head_tiles)};
}

/// Keys, and the tiles that hold them.
struct KeySpan {
  std::int32_t begin_key = 0;
  std::int32_t end_key = 0;
  std::int32_t first_tile = 0;
  std::int32_t end_tile = 0;

  [[nodiscard]] constexpr std::int32_t tiles() const { return end_tile - first_tile; }
};
/// What tokens first_token … first_token + num_tokens - 1 of a sequence see together.
constexpr KeySpan keys_seen(const CutShape& shape, std::int32_t new_tokens, std::int32_t kv_len,
                            std::int32_t first_token, std::int32_t num_tokens) {
  const std::int32_t first = kv_len - new_tokens + first_token;
  const std::int32_t begin = shape.reach.begin(first);
  const std::int32_t end = shape.reach.end(first + num_tokens - 1, kv_len);
  if (begin >= end) return {};
  return {begin, end, begin >> shape.log_tile_keys, ((end - 1) >> shape.log_tile_keys) + 1};
}

// ---- Slots
// ---------------------------------------------------------------------------------------

constexpr bool is_streamed(const CutShape& shape, std::int32_t new_tokens) {
  return shape.streams && new_tokens > 0 && new_tokens <= shape.q_tile;
}

/// A sequence's units of one head tile: its key tiles, or one where it sees no key; 0 where it is
/// not streamed.
constexpr std::int32_t units_of(const CutShape& shape, std::int32_t new_tokens,
                                std::int32_t kv_len) {
  if (!is_streamed(shape, new_tokens)) return 0;
  const std::int32_t tiles = keys_seen(shape, new_tokens, kv_len, 0, new_tokens).tiles();
  return tiles > 0 ? tiles : 1;
}

/// The line of a step's units, cut.
struct Slots {
  std::int32_t count = 0;
  std::int32_t run = 1;    ///< Units of a slot; the last may have fewer.
  std::int32_t units = 0;  ///< Of all.
};
/// `each`: the units of every sequence and head tile where all have as many, else 0. Sharing one
/// between slots costs a meeting of blocks, so that slots are made whole ones, or even parts of
/// one, where that makes them at most a sixteenth longer. A single unit is an even part of any.
constexpr Slots slots_of(std::int32_t units, Divider by_most_slots, std::int32_t each) {
  if (units == 0) return {};
  const auto last = static_cast<std::uint32_t>(units) - 1;
  const auto even = static_cast<std::int32_t>(divide(last, by_most_slots)) + 1;
  std::int32_t run = even > kMinSlotTiles ? even : kMinSlotTiles;
  if (each > 0 && run > 1) {
    const std::int32_t whole =
        run >= each ? ceil_div_small(run, each) * each : ceil_div_small(each, div_small(each, run));
    if (whole - run <= run / 16) run = whole;
  }
  return {ceil_div_small(units, run), run, units};
}

/// Which slots share the units [begin, end) of one sequence and head tile.
struct Sharing {
  std::int32_t first_slot = 0;
  std::int32_t num_parts = 1;
};
constexpr Sharing sharing_of(std::int32_t begin, std::int32_t end, std::int32_t run) {
  const std::int32_t first = div_small(begin, run);
  return {first, div_small(end - 1, run) - first + 1};
}
/// A slot has two partial results at most: of what it goes on with, and of what goes on behind it.
/// Beyond a piece's first part they are two apart.
constexpr std::int32_t partial_of(const Sharing& sharing, std::int32_t part) {
  return 2 * (sharing.first_slot + part) + (part == 0 ? 1 : 0);
}

/// Parts that are added at once where a block would read too much if it added all: as many as there
/// are groups, or half of that. `part_floats`: sums of a part.
constexpr std::int32_t parts_of_group(std::int32_t parts, std::int32_t part_floats) {
  constexpr std::int64_t kMostFloats = 0x40000;  // what a second meeting costs
  if (std::int64_t{parts} * part_floats <= kMostFloats) return parts;
  std::int32_t group = 4;
  while (group * group < parts) group *= 2;
  return group < parts ? group : parts;
}

// ---- Items
// ---------------------------------------------------------------------------------------

/// The most key tiles that any q tile of a sequence sees.
constexpr std::int64_t visible_tiles(const CutShape& shape, std::int32_t new_tokens,
                                     std::int32_t kv_len) {
  if (new_tokens == 0 || kv_len == 0) return 0;
  const std::int64_t all = ceil_div(kv_len, shape.tile_keys);
  if (shape.reach.left == Reach::kFar || shape.reach.right == Reach::kFar) return all;
  const std::int64_t span = least(shape.reach.left, kv_len) + least(shape.q_tile, new_tokens) +
                            least(shape.reach.right, kv_len);
  return least(all, ceil_div(span - 1, shape.tile_keys) + 1);
}

/// A sequence's share of the items' work, in key tiles of q tiles.
constexpr std::int64_t work_of(const CutShape& shape, std::int32_t new_tokens,
                               std::int32_t kv_len) {
  if (is_streamed(shape, new_tokens)) return 0;
  return ceil_div(new_tokens, shape.q_tile) * visible_tiles(shape, new_tokens, kv_len);
}

/// Key tiles of an item of a step, or of a sequence for itself.
constexpr std::int64_t run_length(const CutShape& shape, std::int64_t work) {
  const std::int64_t target = shape.batch_invariant ? kInvariantTargetItems : kTargetItems;
  return most(kMinSplitTiles, ceil_div(work * shape.head_tiles, target));
}

/// How one sequence is cut into items.
struct Cut {
  std::int32_t split_tiles = 1;
  std::int32_t num_splits = 0;
  std::int64_t num_items = 0;
  std::int64_t num_partial_rows = 0;
};
constexpr Cut cut_of(const CutShape& shape, std::int32_t new_tokens, std::int32_t kv_len,
                     std::int64_t step_run) {
  if (is_streamed(shape, new_tokens)) return {};
  const std::int64_t q_tiles = ceil_div(new_tokens, shape.q_tile);
  const std::int64_t tiles = most(visible_tiles(shape, new_tokens, kv_len), 1);
  const std::int64_t run = shape.batch_invariant ? run_length(shape, q_tiles * tiles) : step_run;
  const std::int64_t even = ceil_div(tiles, ceil_div(tiles, run));
  const std::int64_t splits = q_tiles == 0 ? 0 : ceil_div(tiles, even);
  return {static_cast<std::int32_t>(even), static_cast<std::int32_t>(splits), q_tiles * splits,
          splits > 1 ? new_tokens * splits : 0};
}

// ---- Bounds
// --------------------------------------------------------------------------------------

/// What a step within maxima is dealt to at most. Splits of a sequence are at most tiles / run + 1,
/// and the run is at least work * head_tiles / target; where there are two or more, tiles > run.
struct CutBounds {
  std::int64_t num_items = 0;         ///< Of one head tile.
  std::int64_t num_partial_rows = 0;  ///< Of items; a row has all query heads.
  std::int32_t num_slots = 0;
  std::int64_t slot_rows = 0;  ///< Rows of a slot's partial result.
};
constexpr CutBounds cut_bounds(const CutShape& shape, const StepMaxima& maxima,
                               std::int32_t most_slots, std::int32_t tile_heads) {
  CutBounds bounds;
  const std::int64_t tiles = ceil_div(maxima.max_kv_len, shape.tile_keys);
  if (maxima.num_tokens == 0 || maxima.num_seqs == 0) return bounds;
  if (shape.streams) {
    const std::int64_t units = most(tiles, 1) * maxima.num_seqs * shape.head_tiles;
    bounds.num_slots = static_cast<std::int32_t>(least(most_slots, ceil_div(units, kMinSlotTiles)));
    bounds.slot_rows = least(shape.q_tile, maxima.max_new_tokens) * tile_heads;
    if (maxima.max_new_tokens <= shape.q_tile) return bounds;
  }
  const std::int64_t q_tiles =
      least(maxima.num_tokens, maxima.num_tokens / shape.q_tile + maxima.num_seqs);
  bounds.num_items = q_tiles;
  if (tiles <= kMinSplitTiles) return bounds;
  const std::int64_t groups = shape.batch_invariant ? maxima.num_seqs : 1;
  const std::int64_t extra =
      groups *
      ceil_div(shape.batch_invariant ? kInvariantTargetItems : kTargetItems, shape.head_tiles);
  const std::int64_t splits = least(ceil_div(tiles, kMinSplitTiles), extra / groups + 1);
  bounds.num_items = least(q_tiles + extra, q_tiles * splits);
  bounds.num_partial_rows = least(2 * shape.q_tile * extra, maxima.num_tokens * splits);
  return bounds;
}

/// Rows of the partial results of slots. Never fewer than an instance for few rows would take, so
/// that what suffices for a step suffices for one of fewer tokens.
constexpr std::int64_t slot_partial_rows(const CutBounds& bounds, std::int32_t widest,
                                         std::int32_t num_multiprocessors, std::size_t smem_bytes) {
  std::int64_t rows = std::int64_t{2} * bounds.num_slots * bounds.slot_rows;
  if (rows == 0) return 0;
  for (const std::int32_t few : {kProductRows, kMostFewRows}) {
    if (bounds.slot_rows <= few) break;
    const Instance instance = instance_of(widest, few, smem_bytes);
    rows = most(rows, 2 * least(num_multiprocessors * instance.blocks, kMaxSlots) * few);
  }
  return rows;
}

}  // namespace octavo::kernels::flash2
