// SPDX-License-Identifier: Apache-2.0
// How a step's attention is cut into work items: a closed form over the lengths, so that a single
// pass of prefix sums gives it, here or in one thread block of a GPU.
//
// An item is (sequence b, q tile, split). A q tile is q_tile new tokens; its keys, in tiles of
// key_tile positions, are cut into runs of split_tiles[b] tiles. The run's length is the same for
// the whole step, as long as brings about kTargetItems items over all KV heads, and then evened
// within a sequence: so no item is longer than the run, and the number of partials is bounded
// whatever the lengths are. In batch-invariant mode the run is computed for each sequence as if it
// were alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace octavo::plan {

/// Items over all KV heads that a step is cut into at most, beyond one for each q tile and head.
inline constexpr std::int64_t kTargetItems = 256;
/// The same for each sequence alone, in batch-invariant mode.
inline constexpr std::int64_t kInvariantTargetItems = 64;
/// No run is shorter: a partial must be worth its combination.
inline constexpr std::int64_t kMinSplitTiles = 4;

struct ScheduleShape {
  std::int32_t key_tile = 0;  ///< Positions.
  std::int32_t q_tile = 0;    ///< Tokens.
  std::int32_t num_kv_heads = 0;
  bool causal = true;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  bool batch_invariant = false;

  friend bool operator==(const ScheduleShape&, const ScheduleShape&) = default;
};

struct Schedule {
  ScheduleShape shape;
  std::vector<std::int64_t> item_offsets;  ///< [num_seqs + 1]
  std::vector<std::int64_t>
      partial_offsets;  ///< [num_seqs + 1], rows; one for each token and split of split sequences
  std::vector<std::int32_t> split_tiles;  ///< [num_seqs]
  std::vector<std::int32_t> num_splits;   ///< [num_seqs]; 0 without new tokens

  [[nodiscard]] std::int64_t num_items() const { return item_offsets.back(); }
  [[nodiscard]] std::int64_t num_partial_rows() const { return partial_offsets.back(); }
};

/// token_offsets [num_seqs + 1] and kv_lens [num_seqs] as in a plan. Reuses the memory of
/// `schedule`.
void make_schedule(std::span<const std::int32_t> token_offsets,
                   std::span<const std::int32_t> kv_lens, const ScheduleShape& shape,
                   Schedule& schedule);

/// The schedules of one step, one for each shape that its layers use. Forgetting them keeps their
/// memory.
class ScheduleSet {
 public:
  /// The schedule of a shape, made when first asked for. Lengths as for make_schedule, the same at
  /// each call since `clear`.
  const Schedule& get(std::span<const std::int32_t> token_offsets,
                      std::span<const std::int32_t> kv_lens, const ScheduleShape& shape);
  void clear() { num_used_ = 0; }

 private:
  std::vector<Schedule> schedules_;
  std::size_t num_used_ = 0;
};

/// The most key tiles that any q tile of a sequence sees.
std::int64_t max_visible_tiles(std::int32_t new_tokens, std::int32_t kv_len,
                               const ScheduleShape& shape);

}  // namespace octavo::plan
