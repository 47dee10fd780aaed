// SPDX-License-Identifier: Apache-2.0
// A unit's walk over its key tiles, one tile of look-ahead: where a tile's rows lie, and the next
// tile's rows on their way into the L2 cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/key_tile.h"
#include "kernels/cpu/unit.h"

namespace octavo::kernels::cpu {

/// Rows that are wanted later, a cache line at a time, in the order of memory: the heads of a slot
/// together, where they lie together.
class Lines {
 public:
  Lines() = default;

  enum class Order { Slots, Heads };

  /// Rows of `keys`, heads [first_head, end_head).
  Lines(const PagedTensor& tensor, std::int64_t element_bytes, std::int64_t dim,
        const std::int64_t* offsets, Span keys, std::int32_t first_head, std::int32_t end_head,
        Order order = Order::Slots)
      : offsets_(offsets), element_bytes_(element_bytes), keys_(keys), key_(keys.begin) {
    if (keys.empty() || first_head >= end_head) return;
    const std::int64_t heads = end_head - first_head;
    const bool together = order == Order::Slots && tensor.head_stride == dim;
    base_ = static_cast<const char*>(tensor.data) + first_head * tensor.head_stride * element_bytes;
    head_bytes_ = tensor.head_stride * element_bytes;
    piece_lines_ = ((together ? heads * dim : dim) * element_bytes + kLine - 1) / kLine;
    heads_left_ = together ? 1 : heads;
    count_ = heads_left_ * (keys.end - keys.begin) * piece_lines_;
    keys_back_ = (kLinesOnWay + piece_lines_ - 1) / piece_lines_;
    first_waiting_ = piece_lines_ < kLongPieceLines ? keys.end : keys.begin + keys_back_;
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
  /// Lines that may be on their way: about what memory serves within twice its latency.
  static constexpr std::int64_t kLinesOnWay = 64;
  /// Shorter pieces are too many to wait for, and their few keys are waited for soon enough.
  static constexpr std::int64_t kLongPieceLines = 8;

  void next_piece() {
    if (++key_ == keys_.end) {
      if (--heads_left_ == 0) return;
      key_ = keys_.begin;
      base_ += head_bytes_;
    }
    start_piece();
  }

  void start_piece() {
    at_ = base_ + offsets_[key_] * element_bytes_;
    piece_lines_left_ = piece_lines_;
    if (key_ >= first_waiting_) wait_for(key_ - keys_back_);
  }

  // By a load, which can't retire before the line is there: the thread falls behind memory by so
  // many lines and no more. Without it prefetches come thicker than memory serves them and drop.
  void wait_for(std::int64_t key) const {
    static_cast<void>(*static_cast<const volatile char*>(base_ + offsets_[key] * element_bytes_));
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
  std::int64_t keys_back_ = 0;
  std::int64_t first_waiting_ = 0;  // the key whose piece is the first to wait for one before it
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

  /// Of the second rows, what is left.
  [[nodiscard]] const Lines& second() const { return second_; }

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

/// Keys of a tile that the direct way scores at once, of all heads of a run, where they are still
/// to come: so many of long slots, so many of short ones.
inline constexpr std::int32_t kFewKeys = 8;
inline constexpr std::int32_t kFewShortKeys = 16;

/// The first few keys of `seen`, up to a multiple of `few`.
inline Span first_keys_of(Span seen, std::int32_t few) {
  return {seen.begin, std::min(seen.end, (seen.begin / few + 1) * few)};
}

/// Goes over the tiles of some heads of a unit. The direct way takes the heads in runs.
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
    locate(unit_, unit_.first_key_tile, next_tile());
  }

  /// Makes tile `t` the current one and looks up the one behind it. The one before stays as it is.
  void enter(std::int64_t t) {
    current_ = (current_ + 1) % 3;
    next_tile().seen = {};
    first_ = t == unit_.first_key_tile;
    last_ = t + 1 == unit_.end_key_tile;
    if (!last_) {
      locate(unit_, t + 1, next_tile());
    } else if (is_direct(unit_) && unit_.source != nullptr) {
      next_unit_ = unit_.source->claim();
      if (next_unit_ != nullptr && next_unit_->first_key_tile < next_unit_->end_key_tile) {
        locate(*next_unit_, next_unit_->first_key_tile, next_tile());
      }
    }
  }

  [[nodiscard]] const KeyTile& tile() const { return tiles_[current_]; }

  /// Where the run of heads that starts with `head` ends.
  [[nodiscard]] std::int32_t run_end(std::int32_t head) const {
    return static_cast<std::int32_t>(std::min<std::int64_t>(head + run_heads_, end_head_));
  }

  /// Bytes of a slot's K that a run reads.
  [[nodiscard]] std::int64_t run_bytes() const {
    const std::int64_t heads =
        std::min<std::int64_t>(run_heads_, unit_.end_head - unit_.first_head);
    return heads * unit_.params->head_dim * element_bytes_;
  }

  /// Whether the run that starts with `head` is the unit's first, and whether its K was fetched by
  /// the unit before or by nobody.
  [[nodiscard]] bool is_fetched(std::int32_t head) const {
    return first_ && head == first_head_ && unit_.fetched;
  }
  [[nodiscard]] bool is_cold(std::int32_t head) const {
    return first_ && head == first_head_ && !unit_.fetched;
  }

  /// Whether the tile is the unit's last.
  [[nodiscard]] bool is_last() const { return last_; }

  /// Whether nothing comes behind the run that ends at `head`, of this unit or of the next.
  [[nodiscard]] bool is_final(std::int32_t head) const {
    return head == end_head_ && last_ && tiles_[(current_ + 1) % 3].seen.empty();
  }

  /// Rows of the tile.
  [[nodiscard]] Lines keys(Span span, std::int32_t first_head, std::int32_t end_head) const {
    return keys(tile(), span, first_head, end_head);
  }
  [[nodiscard]] Lines values(Span span, std::int32_t first_head, std::int32_t end_head,
                             Lines::Order order = Lines::Order::Slots) const {
    const AttendParams& p = *unit_.params;
    return {p.kv.v, element_bytes_, p.head_dim_v, tile().v_offsets,
            span,   first_head,     end_head,     order};
  }

  /// The first few keys of the run behind the one that ends at `head`, if it is the unit's.
  [[nodiscard]] Lines first_keys_behind(std::int32_t head, std::int32_t few) const {
    if (head < end_head_) return keys(first_keys_of(tile().seen, few), head, run_end(head));
    if (last_) return {};
    const KeyTile& next = tiles_[(current_ + 1) % 3];
    return keys(next, first_keys_of(next.seen, few), first_head_, run_end(first_head_));
  }

  /// All K of the run behind the one that ends at `head`. If it is the next unit's, it counts as
  /// fetched then.
  [[nodiscard]] Lines keys_behind(std::int32_t head) {
    if (head < end_head_) return keys(tile().seen, head, run_end(head));
    if (!last_) return keys(next_tile(), next_tile().seen, first_head_, run_end(first_head_));
    if (next_unit_ == nullptr) return {};
    next_unit_->fetched = true;
    const std::int64_t end =
        std::min<std::int64_t>(next_unit_->first_head + run_heads_, next_unit_->end_head);
    return keys(next_tile(), next_tile().seen, next_unit_->first_head,
                static_cast<std::int32_t>(end));
  }

  /// K and V of the next tile, by heads.
  [[nodiscard]] Lines next_keys() {
    return keys(next_tile(), next_tile().seen, first_head_, end_head_);
  }
  [[nodiscard]] Lines next_values() {
    const AttendParams& p = *unit_.params;
    const KeyTile& next = next_tile();
    return {p.kv.v,    element_bytes_, p.head_dim_v, next.v_offsets,
            next.seen, first_head_,    end_head_};
  }

 private:
  /// Bytes of a slot that a run reads. Long enough for memory's pages, short enough for a tile of
  /// K and two of V, whose rows fall into few sets of the L2 cache, not to throw each other out.
  static constexpr std::int64_t kRunBytes = 2048;

  KeyTile& next_tile() { return tiles_[(current_ + 1) % 3]; }

  [[nodiscard]] Lines keys(const KeyTile& of, Span span, std::int32_t first,
                           std::int32_t end) const {
    const AttendParams& p = *unit_.params;
    return {p.kv.k, element_bytes_, p.head_dim, of.k_offsets, span, first, end};
  }

  const Unit& unit_;
  Unit* next_unit_ = nullptr;  // whose first tile comes behind the last one
  bool first_ = false;
  bool last_ = false;
  std::int64_t element_bytes_;
  std::int64_t run_heads_;
  std::int32_t first_head_ = 0;
  std::int32_t end_head_ = 0;
  std::size_t current_ = 0;
  KeyTile tiles_[3];  // the one before, the one worked on and the next
};

}  // namespace octavo::kernels::cpu
