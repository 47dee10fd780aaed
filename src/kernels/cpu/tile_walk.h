// SPDX-License-Identifier: Apache-2.0
// A unit's walk over its key tiles, one tile of look-ahead: where a tile's rows lie, and the next
// tile's rows on their way into the L2 cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/key_tile.h"
#include "kernels/cpu/unit.h"

namespace octavo::kernels::cpu {

/// Rows that are wanted later, a cache line at a time, in the order of memory: the heads of a slot
/// together, where they lie together.
class Lines {
 public:
  Lines() = default;

  /// Rows of `keys`, heads [first_head, end_head).
  Lines(const PagedTensor& tensor, std::int64_t element_bytes, std::int64_t dim,
        const std::int64_t* offsets, Span keys, std::int32_t first_head, std::int32_t end_head)
      : offsets_(offsets), element_bytes_(element_bytes), keys_(keys), key_(keys.begin) {
    if (keys.empty() || first_head >= end_head) return;
    const std::int64_t heads = end_head - first_head;
    const bool together = tensor.head_stride == dim;
    base_ = static_cast<const char*>(tensor.data) + first_head * tensor.head_stride * element_bytes;
    head_bytes_ = tensor.head_stride * element_bytes;
    piece_lines_ = ((together ? heads * dim : dim) * element_bytes + kLine - 1) / kLine;
    heads_left_ = together ? 1 : heads;
    count_ = heads_left_ * (keys.end - keys.begin) * piece_lines_;
    start_piece();
  }

  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] bool empty() const { return piece_lines_left_ == 0; }

  void fetch() {
    __builtin_prefetch(at_, 0, 2);
    at_ += kLine;
    if (--piece_lines_left_ == 0) next_piece();
  }

 private:
  static constexpr std::int64_t kLine = 64;

  void next_piece() {
    if (++key_ == keys_.end) {
      key_ = keys_.begin;
      base_ += head_bytes_;
      if (--heads_left_ == 0) return;
    }
    start_piece();
  }

  void start_piece() {
    at_ = base_ + offsets_[key_] * element_bytes_;
    piece_lines_left_ = piece_lines_;
  }

  const char* at_ = nullptr;
  std::int64_t piece_lines_left_ = 0;

  const char* base_ = nullptr;
  const std::int64_t* offsets_ = nullptr;
  std::int64_t element_bytes_ = 0;
  std::int64_t head_bytes_ = 0;
  std::int64_t piece_lines_ = 0;  // that lie together
  std::int64_t heads_left_ = 0;
  std::int64_t count_ = 0;
  Span keys_;
  std::int64_t key_ = 0;
};

/// Fetches rows beside the arithmetic, at an even pace: processors drop prefetches that come too
/// thick.
class Ahead {
 public:
  Ahead() = default;
  /// `first`, then `second`.
  explicit Ahead(const Lines& first, const Lines& second = {}) : first_(first), second_(second) {}

  [[nodiscard]] std::int64_t count() const { return first_.count() + second_.count(); }

  /// Deals so many lines evenly to so many steps.
  void pace(std::int64_t lines, std::int64_t steps) {
    lines_a_step_ = lines * kOne / std::max<std::int64_t>(1, steps);
  }

  /// A step's share.
  void step() {
    for (credit_ += lines_a_step_; credit_ >= kOne; credit_ -= kOne) fetch();
  }

  /// All that is left of the first rows.
  void finish_first() {
    while (!first_.empty()) first_.fetch();
  }

  /// All that is left.
  void finish() {
    finish_first();
    while (!second_.empty()) second_.fetch();
  }

 private:
  static constexpr std::int64_t kOne = 256;

  void fetch() {
    if (!first_.empty()) {
      first_.fetch();
    } else if (!second_.empty()) {
      second_.fetch();
    }
  }

  std::int64_t lines_a_step_ = 0;  // in units of 1 / kOne
  std::int64_t credit_ = 0;
  Lines first_;
  Lines second_;
};

/// The way is decided by the item's rows alone.
inline bool is_direct(const Unit& unit) {
  return std::int64_t{unit.num_tokens} * (unit.params->num_q_heads / unit.params->num_kv_heads) <=
         kDirectRows;
}

/// Goes over the tiles of some heads of a unit. The direct way takes the heads in runs: while a
/// run's scores are made its V is fetched, while its V is summed the next run's K, which may be the
/// next tile's or the next unit's.
class TileWalk {
 public:
  explicit TileWalk(const Unit& unit) : unit_(unit) {
    const AttendParams& p = *unit.params;
    element_bytes_ = dtype_bytes(p.kv.dtype);
    run_heads_ = std::max<std::int64_t>(1, kRunBytes / (p.head_dim * element_bytes_));
  }

  /// Looks up the first tile.
  void start(std::int32_t first_head, std::int32_t end_head) {
    first_head_ = first_head;
    end_head_ = end_head;
    last_ = false;
    if (unit_.first_key_tile >= unit_.end_key_tile) return;
    locate(unit_, unit_.first_key_tile, tiles_[1 - current_]);
  }

  /// Makes tile `t` the current one and looks up the one behind it.
  void enter(std::int64_t t) {
    current_ = 1 - current_;
    KeyTile& next = tiles_[1 - current_];
    next.seen = {};
    last_ = t + 1 == unit_.end_key_tile;
    cold_ = t == unit_.first_key_tile && !unit_.fetched;
    if (!last_) {
      locate(unit_, t + 1, next);
    } else if (is_direct(unit_) && unit_.source != nullptr) {
      next_ = unit_.source->claim();
      if (next_ != nullptr && next_->first_key_tile < next_->end_key_tile) {
        locate(*next_, next_->first_key_tile, next);
      }
    }
  }

  [[nodiscard]] const KeyTile& tile() const { return tiles_[current_]; }

  /// Where the run of heads that starts with `head` ends.
  [[nodiscard]] std::int32_t run_end(std::int32_t head) const {
    return static_cast<std::int32_t>(std::min<std::int64_t>(head + run_heads_, end_head_));
  }

  /// Whether the tile is the first of a unit whose first K nobody has fetched.
  [[nodiscard]] bool is_cold() const { return cold_; }

  [[nodiscard]] Lines values(std::int32_t first_head, std::int32_t end_head) const {
    return values(tile(), tile().seen, first_head, end_head);
  }

  /// The tile's keys [begin, end), in so far as they are seen.
  [[nodiscard]] Lines keys_between(std::int64_t begin, std::int64_t end, std::int32_t first_head,
                                   std::int32_t end_head) const {
    return keys(tile(), part(begin, end), first_head, end_head);
  }
  [[nodiscard]] Lines values_between(std::int64_t begin, std::int64_t end, std::int32_t first_head,
                                     std::int32_t end_head) const {
    return values(tile(), part(begin, end), first_head, end_head);
  }

  /// K of the run behind the one that ends at `head`.
  [[nodiscard]] Lines keys_after(std::int32_t head) {
    if (head < end_head_) return keys(tile(), tile().seen, head, run_end(head));
    const KeyTile& next = tiles_[1 - current_];
    if (!last_) return keys(next, next.seen, first_head_, run_end(first_head_));
    if (next_ == nullptr) return {};
    next_->fetched = true;
    const std::int64_t end =
        std::min<std::int64_t>(next_->first_head + run_heads_, next_->end_head);
    return keys(next, next.seen, next_->first_head, static_cast<std::int32_t>(end));
  }

  /// K and V of the next tile.
  [[nodiscard]] Lines next_keys() const {
    const KeyTile& next = tiles_[1 - current_];
    return keys(next, next.seen, first_head_, end_head_);
  }
  [[nodiscard]] Lines next_values() const {
    const KeyTile& next = tiles_[1 - current_];
    return values(next, next.seen, first_head_, end_head_);
  }

 private:
  /// Bytes of a slot that a run reads. Long enough for memory's pages, short enough for a tile of
  /// K and one of V, whose rows fall into few sets of the L2 cache, not to throw each other out.
  static constexpr std::int64_t kRunBytes = 2048;

  [[nodiscard]] Span part(std::int64_t begin, std::int64_t end) const {
    return {static_cast<std::int32_t>(std::max<std::int64_t>(begin, tile().seen.begin)),
            static_cast<std::int32_t>(std::min<std::int64_t>(end, tile().seen.end))};
  }
  [[nodiscard]] Lines keys(const KeyTile& of, Span span, std::int32_t first,
                           std::int32_t end) const {
    const AttendParams& p = *unit_.params;
    return {p.kv.k, element_bytes_, p.head_dim, of.k_offsets, span, first, end};
  }
  [[nodiscard]] Lines values(const KeyTile& of, Span span, std::int32_t first,
                             std::int32_t end) const {
    const AttendParams& p = *unit_.params;
    return {p.kv.v, element_bytes_, p.head_dim_v, of.v_offsets, span, first, end};
  }

  const Unit& unit_;
  Unit* next_ = nullptr;  // whose first tile comes behind the last one
  bool last_ = false;
  bool cold_ = false;
  std::int64_t element_bytes_;
  std::int64_t run_heads_;
  std::int32_t first_head_ = 0;
  std::int32_t end_head_ = 0;
  int current_ = 0;
  KeyTile tiles_[2];  // the one worked on and the next
};

}  // namespace octavo::kernels::cpu
