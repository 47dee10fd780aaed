// SPDX-License-Identifier: Apache-2.0
// Works off one unit of the tiled attention, for each of Highway's targets: online softmax over key
// tiles (Milakov and Gimelshein 2018; Dao et al. 2022), K and V read through the page table. Few
// rows take the direct way, many the packed one; which is decided by the item alone.

#if defined(OCTAVO_KERNELS_CPU_ATTEND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTAVO_KERNELS_CPU_ATTEND_INL_H_
#undef OCTAVO_KERNELS_CPU_ATTEND_INL_H_
#else
#define OCTAVO_KERNELS_CPU_ATTEND_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/finish-inl.h"
#include "kernels/cpu/key_tile.h"
#include "kernels/cpu/packed-inl.h"
#include "kernels/cpu/products-inl.h"
#include "kernels/cpu/soften-inl.h"
#include "kernels/cpu/tile-inl.h"
#include "kernels/cpu/tile_walk.h"
#include "kernels/cpu/unit.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Keys that are scored at once where nothing was fetched before.
constexpr std::int32_t kColdKeys = 8;

// The state of one KV head's rows.
struct HeadRows {
  float* q;
  float* weighted;
  float* sum;
  float* max;
};

template <class ElementsT>
class UnitKernel {
  using T = typename ElementsT::T;

 public:
  explicit UnitKernel(const Unit& unit)
      : unit_(unit),
        p_(*unit.params),
        scratch_(*unit.scratch),
        group_(p_.num_q_heads / p_.num_kv_heads),
        rows_(std::int64_t{unit.num_tokens} * group_),
        q_stride_(padded(p_.head_dim)),
        v_stride_(padded(p_.head_dim_v)),
        products_(std::is_same_v<ElementsT, Bf16Elements> && is_direct(unit) &&
                  p_.q_dtype == DType::BF16 && unit.angles == nullptr && has_products()),
        walk_(unit) {}

  void run() {
    if (is_direct(unit_)) {
      run_direct();
    } else {
      run_packed();
    }
    if (unit_.partials != nullptr && finish_split(unit_)) combine_rows(unit_, scratch_.row);
  }

 private:
  [[nodiscard]] const KeyTile& tile() const { return walk_.tile(); }

  [[nodiscard]] HeadRows head_rows(std::int32_t h) const {
    const std::int64_t at = std::int64_t{h - unit_.first_head} * kDirectRows;
    return {scratch_.q + at * q_stride_, scratch_.weighted + at * v_stride_,
            scratch_.sum + at * kMaxLanes, scratch_.max + at};
  }
  [[nodiscard]] std::int32_t token_of(std::int64_t row) const {
    return unit_.first_token +
           static_cast<std::int32_t>(std::min<std::int64_t>(row, rows_ - 1) / group_);
  }
  [[nodiscard]] std::int32_t q_head_of(std::int32_t h, std::int64_t row) const {
    return h * group_ + static_cast<std::int32_t>(row % group_);
  }
  [[nodiscard]] PageRows<T> keys(std::int32_t h) const {
    return {static_cast<const T*>(p_.kv.k.data) + h * p_.kv.k.head_stride, tile().k_offsets};
  }
  [[nodiscard]] PageRows<T> values(std::int32_t h) const {
    return {static_cast<const T*>(p_.kv.v.data) + h * p_.kv.v.head_stride, tile().v_offsets};
  }

  void run_direct() {
    walk_.start(unit_.first_head, unit_.end_head);
    const bool held = scratch_.q_token == unit_.first_token && scratch_.q_seq == unit_.b &&
                      scratch_.q_first_head == unit_.first_head &&
                      scratch_.q_end_head == unit_.end_head;
    for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) {
      const HeadRows rows = head_rows(h);
      clear(rows, rows_);
      if (!held) load_queries(h, rows.q);
    }
    scratch_.q_seq = unit_.b;
    scratch_.q_token = unit_.first_token;
    scratch_.q_first_head = unit_.first_head;
    scratch_.q_end_head = unit_.end_head;
    for (std::int64_t t = unit_.first_key_tile; t < unit_.end_key_tile; ++t) {
      walk_.enter(t);
      if (tile().seen.empty()) continue;
      for (std::int32_t h = unit_.first_head; h < unit_.end_head; h = walk_.run_end(h)) {
        direct_run(h, walk_.run_end(h));
      }
    }
    for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) end_head(h, head_rows(h));
  }

  void run_packed() {
    scratch_.q_token = -1;
    for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) {
      const HeadRows rows{scratch_.q, scratch_.weighted, scratch_.sum, scratch_.max};
      walk_.start(h, h + 1);
      clear(rows, padded_rows(rows_));
      load_queries(h, rows.q);
      for (std::int64_t t = unit_.first_key_tile; t < unit_.end_key_tile; ++t) {
        walk_.enter(t);
        if (!tile().seen.empty()) packed_tile(h, rows);
      }
      end_head(h, rows);
    }
  }

  void clear(const HeadRows& state, std::int64_t rows) const {
    std::fill_n(state.weighted, rows * v_stride_, 0.0F);
    std::fill_n(state.sum, rows * kMaxLanes, 0.0F);
    std::fill_n(state.max, rows, kNothing);
  }

  // Loads and rotates the head's queries, in the layout that its way wants.
  void load_queries(std::int32_t h, float* q) {
    const bool direct = is_direct(unit_);
    std::fill_n(q, (direct ? rows_ : padded_rows(rows_)) * q_stride_, 0.0F);
    for (std::int64_t r = 0; r < rows_; ++r) {
      const std::int32_t i = token_of(r);
      const std::int64_t from = token_offset(p_.q_layout, p_.batch, unit_.b, i) +
                                q_head_of(h, r) * p_.q_layout.head_stride;
      if (products_) {  // as it is
        const auto* bits = static_cast<const std::uint16_t*>(p_.q) + from;
        fill_row(reinterpret_cast<std::uint16_t*>(q + r * q_stride_), 1, p_.head_dim,
                 [&](std::int32_t e) { return bits[e * p_.q_layout.dim_stride]; });
        continue;
      }
      float* row = direct ? q + r * q_stride_ : scratch_.row;
      load_row(p_.q, p_.q_dtype, from, p_.q_layout.dim_stride, p_.head_dim, row);
      if (unit_.angles != nullptr) {
        rotate(p_.rope, unit_.angles[p_.batch.token_offsets[unit_.b] + i], row);
      }
      if (direct) continue;
      float* block = q + r / kPackedRows * kPackedRows * q_stride_ + r % kPackedRows;
      for (std::int32_t e = 0; e < p_.head_dim; ++e) block[std::int64_t{e} * kPackedRows] = row[e];
    }
  }

  [[nodiscard]] Logits logits_of(std::int32_t h, std::int64_t row) const {
    Logits result{p_.scale, p_.softcap, 0.0F, 0.0F};
    if (p_.alibi_slopes != nullptr) {
      result.slope = p_.alibi_slopes[q_head_of(h, row)];
      result.distance =
          static_cast<float>(position_of(p_.batch, unit_.b, token_of(row)) - tile().first);
    }
    return result;
  }

  // What rows [first, first + count) see. Returns whether it is the same for all.
  bool find_spans(std::int64_t first, int count, Span* spans) const {
    bool same = true;
    for (int r = 0; r < count; ++r) {
      spans[r] =
          tile().uniform ? tile().seen : clip(keys_of(unit_, token_of(first + r)), tile().first);
      same = same && spans[r] == spans[0];
    }
    return same;
  }

  // Softmax step of `count` rows from `first` on. `factors` say how much what came before shrinks.
  void soften_rows(std::int32_t h, std::int64_t first, int count, const HeadRows& state,
                   const Span* spans, float* scores, float* factors) {
    const bool whole = tile().uniform && tile().seen == Span{0, kKeyTile};
    const auto step = whole ? soften<false> : soften<true>;
    for (int r = 0; r < count; ++r) {
      const std::int64_t row = first + r;
      factors[r] = step(logits_of(h, row), spans[r], scores + std::int64_t{r} * kKeyTile,
                        state.max[row], state.sum + row * kMaxLanes);
    }
  }

  // Scores against keys [begin, end) of the tile.
  template <int kRows>
  void score_rows(std::int32_t h, const float* q, Span keys, float* scores, Ahead& ahead) {
#if OCTAVO_HAS_PRODUCTS
    if constexpr (std::is_same_v<ElementsT, Bf16Elements>) {
      if (products_) {
        return score_products<kRows>(reinterpret_cast<const std::uint16_t*>(q), 2 * q_stride_,
                                     this->keys(h), keys.begin, keys.end, p_.head_dim, scores,
                                     ahead);
      }
    }
#endif
    score_direct<ElementsT, kRows>(q, q_stride_, this->keys(h), keys.begin, keys.end, p_.head_dim,
                                   scores, ahead);
  }

  template <int kRows>
  void weigh_rows(const Span* spans, bool same, const float* scores, const PageRows<T>& v,
                  const float* factors, float* to, Ahead& ahead) {
    if (same) {
      weigh<ElementsT, Sums::Merge, kRows, kDirectVectors>(
          scores, v, spans[0].begin, spans[0].end, p_.head_dim_v, factors, to, v_stride_, ahead);
      return;
    }
    for (int r = 0; r < kRows; ++r) {
      weigh<ElementsT, Sums::Merge, 1, kDirectVectors>(
          scores + std::int64_t{r} * kKeyTile, v, spans[r].begin, spans[r].end, p_.head_dim_v,
          factors + r, to + r * v_stride_, v_stride_, ahead);
    }
  }

  // Calls `block(first row, number of rows)` for the rows in blocks, the number as a constant.
  template <typename BlockT>
  void for_blocks(BlockT block) {
    std::int64_t first = 0;
    for (; first + kDirectBlock <= rows_; first += kDirectBlock) {
      block(first, std::integral_constant<int, kDirectBlock>());
    }
    const std::int64_t left = rows_ - first;
    if constexpr (kDirectBlock > 3) {
      if (left == 3) block(first, std::integral_constant<int, 3>());
    }
    if constexpr (kDirectBlock > 2) {
      if (left == 2) block(first, std::integral_constant<int, 2>());
    }
    if (left == 1) block(first, std::integral_constant<int, 1>());
  }

  // Steps that a block of rows takes in its tile; see score_direct and weigh.
  [[nodiscard]] std::int64_t score_steps(Span keys) const {
    const std::int64_t fours = (keys.end + 3) / 4 - keys.begin / 4;
    return fours * std::max<std::int64_t>(1, p_.head_dim / (products_ ? 2 * kLanes : kLanes));
  }
  [[nodiscard]] std::int64_t weigh_steps() const {
    constexpr std::int64_t kPass = kDirectVectors * kLanes;
    const std::int64_t passes =
        p_.head_dim_v / kPass + (p_.head_dim_v % kPass + kLanes - 1) / kLanes;
    return (tile().seen.end - tile().seen.begin) * passes;
  }

  // What a row's scores of a few keys, softmax step included, and their sums take, in one unit:
  // measured, by the numbers of multiply-adds and of reductions.
  [[nodiscard]] std::int64_t score_time() const {
    return (products_ ? 5 : 8) * padded(p_.head_dim) / kMaxLanes + 32;
  }
  [[nodiscard]] std::int64_t weigh_time() const { return 9 * padded(p_.head_dim_v) / kMaxLanes; }

  // Scores of all rows of a run of heads, a few keys of all heads at a time while the next few and
  // their V come: nothing was fetched before, and all at once would be dropped.
  void score_cold(std::int32_t first_head, std::int32_t end_head) {
    const std::int64_t blocks = (rows_ + kDirectBlock - 1) / kDirectBlock;
    const Span seen = tile().seen;
    Ahead(walk_.keys_between(seen.begin, seen.begin + kColdKeys, first_head, end_head)).finish();
    for (std::int32_t key = seen.begin; key < seen.end; key += kColdKeys) {
      const Span now{key, std::min(seen.end, key + kColdKeys)};
      Ahead ahead(walk_.keys_between(now.end, now.end + kColdKeys, first_head, end_head),
                  walk_.values_between(now.begin, now.end, first_head, end_head));
      ahead.pace(ahead.count(), (end_head - first_head) * blocks * score_steps(now));
      for (std::int32_t h = first_head; h < end_head; ++h) {
        const std::int64_t at = (h - first_head) * rows_;
        for_blocks([&](std::int64_t first, auto count) {
          score_rows<count()>(h, head_rows(h).q + first * q_stride_, now,
                              scratch_.scores + (at + first) * kKeyTile, ahead);
        });
      }
      ahead.finish();
    }
  }

  // Scores and weights of all rows of a run of heads, then their sums.
  void direct_run(std::int32_t first_head, std::int32_t end_head) {
    Span spans[kDirectRows];
    const bool same = find_spans(0, static_cast<int>(rows_), spans);
    const std::int64_t heads = end_head - first_head;
    const std::int64_t blocks = (rows_ + kDirectBlock - 1) / kDirectBlock;
    const bool cold = walk_.is_cold();
    if (cold) score_cold(first_head, end_head);
    Ahead ahead(cold ? Lines() : walk_.values(first_head, end_head), walk_.keys_after(end_head));
    const std::int64_t beside_scores =
        cold ? 0 : ahead.count() * score_time() / (score_time() + weigh_time());
    ahead.pace(beside_scores, heads * blocks * score_steps(tile().seen));
    for (std::int32_t h = first_head; h < end_head; ++h) {
      const HeadRows state = head_rows(h);
      const std::int64_t at = (h - first_head) * rows_;
      for_blocks([&](std::int64_t first, auto count) {
        float* scores = scratch_.scores + (at + first) * kKeyTile;
        if (!cold) {
          score_rows<count()>(h, state.q + first * q_stride_, tile().seen, scores, ahead);
        }
        soften_rows(h, first, count(), state, spans + first, scores, scratch_.factors + at + first);
      });
    }
    ahead.finish_first();
    ahead.pace(ahead.count() - beside_scores, heads * blocks * weigh_steps());
    for (std::int32_t h = first_head; h < end_head; ++h) {
      const HeadRows state = head_rows(h);
      const std::int64_t at = (h - first_head) * rows_;
      for_blocks([&](std::int64_t first, auto count) {
        weigh_rows<count()>(spans + first, same, scratch_.scores + (at + first) * kKeyTile,
                            values(h), scratch_.factors + at + first,
                            state.weighted + first * v_stride_, ahead);
      });
    }
    ahead.finish();
  }

  void packed_tile(std::int32_t h, const HeadRows& state) {
    pack_keys<ElementsT>(keys(h), p_.head_dim, scratch_.k_packed);
    pack_values<ElementsT>(values(h), tile().seen.begin, tile().seen.end, p_.head_dim_v,
                           scratch_.v_packed, v_stride_);
    Ahead ahead(walk_.next_keys(), walk_.next_values());
    ahead.pace(ahead.count(), padded_rows(rows_));
    for (std::int64_t first = 0; first < rows_; first += kPackedRows) {
      for (int r = 0; r < kPackedRows; ++r) ahead.step();
      if (!tile().uniform && block_sees_nothing(first)) continue;
      score_packed(state.q + first * q_stride_, scratch_.k_packed, p_.head_dim, scratch_.scores);
      finish_packed(h, first, state);
    }
  }

  void finish_packed(std::int32_t h, std::int64_t first, const HeadRows& state) {
    Span spans[kPackedRows];
    float factors[kPackedRows];
    const bool same = find_spans(first, kPackedRows, spans);
    soften_rows(h, first, kPackedRows, state, spans, scratch_.scores, factors);
    const DenseRows v{scratch_.v_packed, v_stride_};
    float* to = state.weighted + first * v_stride_;
    if (same) {
      Ahead none;
      weigh<F32Elements, Sums::Merge, kPackedRows, kPackedVectors>(
          scratch_.scores, v, spans[0].begin, spans[0].end, p_.head_dim_v, factors, to, v_stride_,
          none);
    } else {
      weigh_packed_rows(spans, scratch_.scores, v, p_.head_dim_v, factors, to, v_stride_,
                        scratch_.part);
    }
  }

  [[nodiscard]] bool block_sees_nothing(std::int64_t first) const {
    const KeyRange from = keys_of(unit_, token_of(first));
    const KeyRange to = keys_of(unit_, token_of(first + kPackedRows - 1));
    return clip({from.begin, to.end}, tile().first).empty();
  }

  void end_head(std::int32_t h, const HeadRows& state) const {
    for (std::int64_t r = 0; r < rows_; ++r) {
      float sum = 0.0F;
      for (std::int64_t lane = 0; lane < kLanes; ++lane) sum += state.sum[r * kMaxLanes + lane];
      const RowState<float> row{state.weighted + r * v_stride_, state.max[r], sum};
      const std::int32_t head = q_head_of(h, r);
      if (unit_.partials == nullptr) {
        finish_wide_row(p_, unit_.b, token_of(r), head, row);
        continue;
      }
      const std::int64_t to =
          (unit_.first_partial_row + r / group_ * unit_.num_splits + unit_.split) * p_.num_q_heads +
          head;
      std::copy_n(row.weighted, v_stride_, unit_.partials->weighted + to * v_stride_);
      unit_.partials->max[to] = row.max;
      unit_.partials->sum[to] = sum;
    }
  }

  const Unit& unit_;
  const AttendParams& p_;
  UnitScratch& scratch_;
  std::int32_t group_;
  std::int64_t rows_;
  std::int64_t q_stride_;
  std::int64_t v_stride_;
  bool products_;  // queries stay BF16
  TileWalk walk_;
};

}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
