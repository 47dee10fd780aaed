// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule.h"

#include <algorithm>

#include "base/math.h"

namespace octavo::plan {

using base::ceil_div;

std::int64_t max_visible_tiles(std::int32_t new_tokens, std::int32_t kv_len,
                               const ScheduleShape& shape) {
  if (new_tokens == 0 || kv_len == 0) return 0;
  const std::int64_t all = ceil_div<std::int64_t>(kv_len, shape.key_tile);
  const std::int64_t right = shape.causal ? 0 : shape.window_right;
  if (shape.window_left < 0 || right < 0) return all;
  // A q tile sees window_left keys before its first token, its own tokens, and `right` behind its
  // last; anywhere in a tile. Bounds beyond the sequence are cut first, so that callers may use
  // huge ones.
  const std::int64_t left = std::min<std::int64_t>(shape.window_left, kv_len);
  const std::int64_t span =
      left + std::min(shape.q_tile, new_tokens) + std::min<std::int64_t>(right, kv_len);
  return std::min(all, ceil_div<std::int64_t>(span - 1, shape.key_tile) + 1);
}

namespace {

std::int64_t run_length(std::int64_t tiles, std::int64_t num_kv_heads, std::int64_t target) {
  return std::max(kMinSplitTiles, ceil_div(tiles * num_kv_heads, target));
}

}  // namespace

void make_schedule(std::span<const std::int32_t> token_offsets,
                   std::span<const std::int32_t> kv_lens, const ScheduleShape& shape,
                   Schedule& schedule) {
  const std::size_t num_seqs = kv_lens.size();
  schedule.shape = shape;
  schedule.item_offsets.resize(num_seqs + 1);
  schedule.partial_offsets.resize(num_seqs + 1);
  schedule.split_tiles.resize(num_seqs);
  schedule.num_splits.resize(num_seqs);

  const auto new_tokens = [&](std::size_t b) { return token_offsets[b + 1] - token_offsets[b]; };
  std::int64_t all_tiles = 0;
  for (std::size_t b = 0; b < num_seqs; ++b) {
    all_tiles +=
        ceil_div(new_tokens(b), shape.q_tile) * max_visible_tiles(new_tokens(b), kv_lens[b], shape);
  }
  const std::int64_t common_run = run_length(all_tiles, shape.num_kv_heads, kTargetItems);

  schedule.item_offsets[0] = 0;
  schedule.partial_offsets[0] = 0;
  for (std::size_t b = 0; b < num_seqs; ++b) {
    const std::int64_t q_tiles = ceil_div(new_tokens(b), shape.q_tile);
    const std::int64_t tiles =
        std::max<std::int64_t>(max_visible_tiles(new_tokens(b), kv_lens[b], shape), 1);
    const std::int64_t run = shape.batch_invariant ? run_length(q_tiles * tiles, shape.num_kv_heads,
                                                                kInvariantTargetItems)
                                                   : common_run;
    const std::int64_t even_run = ceil_div(tiles, ceil_div(tiles, run));
    const std::int64_t splits = q_tiles == 0 ? 0 : ceil_div(tiles, even_run);
    schedule.split_tiles[b] = static_cast<std::int32_t>(even_run);
    schedule.num_splits[b] = static_cast<std::int32_t>(splits);
    schedule.item_offsets[b + 1] = schedule.item_offsets[b] + q_tiles * splits;
    schedule.partial_offsets[b + 1] =
        schedule.partial_offsets[b] + (splits > 1 ? new_tokens(b) * splits : 0);
  }
}

const Schedule& ScheduleSet::get(std::span<const std::int32_t> token_offsets,
                                 std::span<const std::int32_t> kv_lens,
                                 const ScheduleShape& shape) {
  for (std::size_t i = 0; i < num_used_; ++i) {
    if (schedules_[i].shape == shape) return schedules_[i];
  }
  if (num_used_ == schedules_.size()) schedules_.emplace_back();
  Schedule& schedule = schedules_[num_used_];
  make_schedule(token_offsets, kv_lens, shape, schedule);
  ++num_used_;
  return schedule;
}

}  // namespace octavo::plan
