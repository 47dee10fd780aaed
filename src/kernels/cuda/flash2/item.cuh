// SPDX-License-Identifier: Apache-2.0
// Which part of a step a block has.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/step.cuh"
#include "kernels/cuda/flash2/finish.cuh"
#include "kernels/cuda/flash2/work.h"

namespace octavo::kernels::flash2 {

using cuda::kAllLanes;

/// What a block works on: tokens first_token … of batch row b, heads first_head … of a KV head,
/// over key tiles [first_tile, end_tile).
struct Item {
  std::int32_t b = 0;
  std::int32_t split = 0;
  std::int32_t num_splits = 1;
  std::int32_t first_token = 0;
  std::int32_t num_tokens = 0;
  std::int32_t kv_head = 0;
  std::int32_t first_head = 0;
  std::int32_t num_heads = 0;
  std::int64_t first_position = 0;  ///< Of first_token.
  std::int32_t kv_len = 0;
  std::int32_t begin_key = 0;  ///< Keys that any of the tokens sees.
  std::int32_t end_key = 0;
  std::int32_t first_tile = 0;
  std::int32_t end_tile = 0;

  [[nodiscard]] __device__ int num_rows() const { return num_tokens * num_heads; }
};

/// The last b with offsets[b] <= value, found by a warp; offsets[0] <= value < offsets[n].
__device__ inline std::int32_t last_begun(const std::int64_t* offsets, std::int32_t n,
                                          std::int64_t value) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
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

/// Which item block (x, y) has; num_tokens 0: none. Later items come first: under a causal mask
/// they are the longest of a sequence.
__device__ inline Item item_of_block(const Work& w) {
  const AttendParams& a = w.attend;
  Item item;
  const std::int64_t num_items = w.cut.item_offsets[a.batch.num_seqs];
  const std::int64_t index = num_items - 1 - static_cast<std::int64_t>(blockIdx.x);
  if (index < 0) return item;
  const std::int32_t b = last_begun(w.cut.item_offsets, a.batch.num_seqs, index);
  const auto within = static_cast<std::int32_t>(index - w.cut.item_offsets[b]);
  const std::int32_t new_tokens = cuda::new_tokens(a.batch, b);
  item.b = b;
  item.num_splits = w.cut.num_splits[b];
  item.split = within % item.num_splits;
  item.first_token = within / item.num_splits * w.tiling.q_tile;
  item.num_tokens = min(w.tiling.q_tile, new_tokens - item.first_token);
  item.kv_len = a.batch.kv_lens[b];

  const auto head_tile = static_cast<std::int32_t>(blockIdx.y);
  const std::int32_t group = a.num_q_heads / a.num_kv_heads;
  const std::int32_t first = head_tile % w.tiling.tiles_per_group * w.tiling.heads;
  item.kv_head = head_tile / w.tiling.tiles_per_group;
  item.first_head = item.kv_head * group + first;
  item.num_heads = min(w.tiling.heads, group - first);

  item.first_position = std::int64_t{item.kv_len} - new_tokens + item.first_token;
  const std::int64_t last_position = item.first_position + item.num_tokens - 1;
  const KeyRange first_sees =
      visible_keys(a.causal, a.window_left, a.window_right, item.first_position, item.kv_len);
  const KeyRange last_sees =
      visible_keys(a.causal, a.window_left, a.window_right, last_position, item.kv_len);
  if (first_sees.begin < last_sees.end) {
    item.begin_key = static_cast<std::int32_t>(first_sees.begin);
    item.end_key = static_cast<std::int32_t>(last_sees.end);
    const std::int32_t tiles = w.cut.split_tiles[b];
    const std::int32_t end = (item.end_key + kTileKeys - 1) / kTileKeys;
    item.first_tile = item.begin_key / kTileKeys + item.split * tiles;
    item.end_tile = item.split + 1 == item.num_splits ? end : min(item.first_tile + tiles, end);
  }
  return item;
}

}  // namespace octavo::kernels::flash2
