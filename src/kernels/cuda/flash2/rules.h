// SPDX-License-Identifier: Apache-2.0
// How a step is cut into work items: the closed form of plan/schedule.h for one thread of a GPU or
// of a host (a test holds the two against each other), and what follows for a host that knows
// maxima alone. Compiles without CUDA.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace octavo::kernels::flash2 {

/// Rows of a tile: (token, query head) pairs, heads fastest. Keys of a tile.
inline constexpr std::int32_t kTileRows = 64;
inline constexpr std::int32_t kTileKeys = 64;

/// As the plan's.
inline constexpr std::int64_t kTargetItems = 256;
inline constexpr std::int64_t kInvariantTargetItems = 64;
inline constexpr std::int64_t kMinSplitTiles = 4;

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t by) {
  return (value + by - 1) / by;
}
constexpr std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t most(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

/// How query heads and tokens make tiles. A group of more heads than a tile has rows takes several.
struct Tiling {
  std::int32_t tiles_per_group = 1;
  std::int32_t heads = 1;       ///< Of a tile; the last tile of a group may have fewer.
  std::int32_t q_tile = 1;      ///< Tokens of a tile.
  std::int32_t head_tiles = 1;  ///< Of all KV heads.
};
constexpr Tiling tiling_of(std::int32_t num_q_heads, std::int32_t num_kv_heads) {
  Tiling tiling;
  const std::int32_t group = num_q_heads / num_kv_heads;
  tiling.tiles_per_group = static_cast<std::int32_t>(ceil_div(group, kTileRows));
  tiling.heads = static_cast<std::int32_t>(ceil_div(group, tiling.tiles_per_group));
  tiling.q_tile = kTileRows / tiling.heads;
  tiling.head_tiles = num_kv_heads * tiling.tiles_per_group;
  return tiling;
}

/// What the cut depends on beside the lengths.
struct CutShape {
  std::int32_t q_tile = 1;
  std::int32_t head_tiles = 1;
  bool causal = true;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  bool batch_invariant = false;
};
constexpr CutShape cut_shape(const AttendParams& p) {
  const Tiling tiling = tiling_of(p.num_q_heads, p.num_kv_heads);
  return {tiling.q_tile, tiling.head_tiles, p.causal,
          p.window_left, p.window_right,    p.batch_invariant};
}

/// The most key tiles that any q tile of a sequence sees.
constexpr std::int64_t visible_tiles(const CutShape& shape, std::int32_t new_tokens,
                                     std::int32_t kv_len) {
  if (new_tokens == 0 || kv_len == 0) return 0;
  const std::int64_t all = ceil_div(kv_len, kTileKeys);
  const std::int64_t right = shape.causal ? 0 : shape.window_right;
  if (shape.window_left < 0 || right < 0) return all;
  const std::int64_t span =
      least(shape.window_left, kv_len) + least(shape.q_tile, new_tokens) + least(right, kv_len);
  return least(all, ceil_div(span - 1, kTileKeys) + 1);
}

/// A sequence's share of the step's work, in key tiles of q tiles.
constexpr std::int64_t work_of(const CutShape& shape, std::int32_t new_tokens,
                               std::int32_t kv_len) {
  return ceil_div(new_tokens, shape.q_tile) * visible_tiles(shape, new_tokens, kv_len);
}

/// Key tiles of an item of a step, or of a sequence for itself.
constexpr std::int64_t run_length(const CutShape& shape, std::int64_t work) {
  const std::int64_t target = shape.batch_invariant ? kInvariantTargetItems : kTargetItems;
  return most(kMinSplitTiles, ceil_div(work * shape.head_tiles, target));
}

/// How one sequence is cut.
struct Cut {
  std::int32_t split_tiles = 1;
  std::int32_t num_splits = 0;
  std::int64_t num_items = 0;
  std::int64_t num_partial_rows = 0;
};
constexpr Cut cut_of(const CutShape& shape, std::int32_t new_tokens, std::int32_t kv_len,
                     std::int64_t step_run) {
  const std::int64_t q_tiles = ceil_div(new_tokens, shape.q_tile);
  const std::int64_t tiles = most(visible_tiles(shape, new_tokens, kv_len), 1);
  const std::int64_t run = shape.batch_invariant ? run_length(shape, q_tiles * tiles) : step_run;
  const std::int64_t even = ceil_div(tiles, ceil_div(tiles, run));
  const std::int64_t splits = q_tiles == 0 ? 0 : ceil_div(tiles, even);
  return {static_cast<std::int32_t>(even), static_cast<std::int32_t>(splits), q_tiles * splits,
          splits > 1 ? new_tokens * splits : 0};
}

/// What a step within maxima is cut into at most. Splits of a sequence are at most tiles / run + 1,
/// and the run is at least work * head_tiles / target; where there are two or more, tiles > run.
struct CutBounds {
  std::int64_t num_items = 0;
  std::int64_t num_partial_rows = 0;
};
constexpr CutBounds cut_bounds(const CutShape& shape, std::int64_t num_seqs,
                               std::int64_t num_tokens, std::int64_t max_kv_len) {
  const std::int64_t q_tiles = least(num_tokens, num_tokens / shape.q_tile + num_seqs);
  const std::int64_t tiles = ceil_div(max_kv_len, kTileKeys);
  if (tiles <= kMinSplitTiles) return {q_tiles, 0};
  const std::int64_t units = shape.batch_invariant ? num_seqs : 1;
  const std::int64_t extra =
      units *
      ceil_div(shape.batch_invariant ? kInvariantTargetItems : kTargetItems, shape.head_tiles);
  const std::int64_t splits = least(ceil_div(tiles, kMinSplitTiles), extra / units + 1);
  return {least(q_tiles + extra, q_tiles * splits),
          least(2 * shape.q_tile * extra, num_tokens * splits)};
}

}  // namespace octavo::kernels::flash2
