// SPDX-License-Identifier: Apache-2.0
// Works off one unit of the tiled attention, for each of Highway's targets: online softmax over key
// tiles (Milakov and Gimelshein 2018; Dao et al. 2022), K and V read through the page table. Few
// rows take the direct way, many the packed one; which is decided by the item alone. Needs
// tile-inl.h's two ways and math-inl.h.

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
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/cpu/key_tile.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/output.h"
#include "kernels/cpu/packed-inl.h"
#include "kernels/cpu/products-inl.h"
#include "kernels/cpu/tile-inl.h"
#include "kernels/cpu/tile_walk.h"
#include "kernels/cpu/unit.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// The state of one KV head's rows.
struct HeadRows {
  float* q;
  float* weighted;
  float* sum;
  float* max;
};

// What turns a product into a logit.
struct Logits {
  float scale;
  float softcap;
  float slope;     // of ALiBi
  float distance;  // from the tile's first key to the row's position
};

// One row's softmax step: scores become weights exp(logit - max); max and sums move on. Returns the
// factor by which what was summed before shrinks.
template <bool kMasked>
HWY_NOINLINE float soften(const Logits& logits, Span span, float* HWY_RESTRICT scores, float& max,
                          float* HWY_RESTRICT sum) {
  const FloatTag d;
  const FloatVec scale = hn::Set(d, logits.scale);
  FloatVec highest = hn::Set(d, kNothing);
  OCTAVO_UNROLL_4
  for (std::int64_t at = 0; at < kKeyTile; at += kLanes) {
    FloatVec s = hn::Mul(hn::Load(d, scores + at), scale);
    const FloatVec keys = hn::Iota(d, static_cast<float>(at));
    if (HWY_UNLIKELY(logits.softcap > 0.0F)) {
      const FloatVec cap = hn::Set(d, logits.softcap);
      s = hn::Mul(cap, hyperbolic_tangent(d, hn::Div(s, cap)));
    }
    if (HWY_UNLIKELY(logits.slope != 0.0F)) {
      const FloatVec distance = hn::Abs(hn::Sub(hn::Set(d, logits.distance), keys));
      s = hn::NegMulAdd(hn::Set(d, logits.slope), distance, s);
    }
    if (kMasked) {
      const auto hidden = hn::Or(hn::Lt(keys, hn::Set(d, static_cast<float>(span.begin))),
                                 hn::Ge(keys, hn::Set(d, static_cast<float>(span.end))));
      s = hn::IfThenElse(hidden, hn::Set(d, kNothing), s);
    }
    hn::Store(s, d, scores + at);
    highest = hn::Max(highest, s);
  }
  const float new_max = std::max(max, hn::GetLane(hn::MaxOfLanes(d, highest)));
  // A row that has seen no key yet keeps max -inf; against 0 its weights are exp(-inf) = 0.
  const float reference = new_max == kNothing ? 0.0F : new_max;
  const float factor =
      max == new_max ? 1.0F : hn::GetLane(exponential(d, hn::Set(d, max - reference)));
  FloatVec total = hn::Zero(d);
  OCTAVO_UNROLL_4
  for (std::int64_t at = 0; at < kKeyTile; at += kLanes) {
    const FloatVec weight =
        exponential(d, hn::Sub(hn::Load(d, scores + at), hn::Set(d, reference)));
    hn::Store(weight, d, scores + at);
    total = hn::Add(total, weight);
  }
  hn::Store(hn::MulAdd(hn::Load(d, sum), hn::Set(d, factor), total), d, sum);
  max = new_max;
  return factor;
}

template <class ElementsT>
class UnitKernel {
  using T = typename ElementsT::T;

 public:
  explicit UnitKernel(const Unit& unit)
      : unit_(unit),
        p_(*unit.params),
        scratch_(*unit.scratch),
        group_(p_.num_q_heads / p_.num_kv_heads),
        rows_(unit.num_tokens * group_),
        q_stride_(padded(p_.head_dim)),
        v_stride_(padded(p_.head_dim_v)),
        products_(std::is_same_v<ElementsT, Bf16Elements> && is_direct(unit) &&
                  p_.q_dtype == DType::BF16 && unit.angles == nullptr && has_products()),
        walk_(unit) {}

  void run() {
    if (is_direct(unit_)) {
      walk_.start(unit_.first_head, unit_.end_head);
      for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) start_head(h, head_rows(h));
      for (std::int64_t t = unit_.first_key_tile; t < unit_.end_key_tile; ++t) {
        walk_.enter(t);
        if (tile().seen.empty()) continue;
        for (std::int32_t h = unit_.first_head; h < unit_.end_head; h = walk_.run_end(h)) {
          direct_run(h, walk_.run_end(h));
        }
      }
      for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) end_head(h, head_rows(h));
      return;
    }
    for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) {
      const HeadRows rows{scratch_.q, scratch_.weighted, scratch_.sum, scratch_.max};
      walk_.start(h, h + 1);
      start_head(h, rows);
      for (std::int64_t t = unit_.first_key_tile; t < unit_.end_key_tile; ++t) {
        walk_.enter(t);
        if (!tile().seen.empty()) packed_tile(h, rows);
      }
      end_head(h, rows);
    }
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

  // Loads and rotates the head's queries, in the layout that its way wants; empties its state.
  void start_head(std::int32_t h, const HeadRows& state) {
    const bool direct = is_direct(unit_);
    const std::int64_t rows = direct ? rows_ : padded_rows(rows_);
    std::fill_n(state.q, rows * q_stride_, 0.0F);
    std::fill_n(state.weighted, rows * v_stride_, 0.0F);
    std::fill_n(state.sum, rows * kMaxLanes, 0.0F);
    std::fill_n(state.max, rows, kNothing);
    for (std::int64_t r = 0; r < rows_; ++r) {
      const std::int32_t i = token_of(r);
      const std::int64_t from = token_offset(p_.q_layout, p_.batch, unit_.b, i) +
                                q_head_of(h, r) * p_.q_layout.head_stride;
      if (products_) {  // as it is; its last axis is dense, or this backend is not asked
        std::memcpy(state.q + r * q_stride_, static_cast<const std::uint16_t*>(p_.q) + from,
                    static_cast<std::size_t>(p_.head_dim) * sizeof(std::uint16_t));
        continue;
      }
      float* row = direct ? state.q + r * q_stride_ : scratch_.row;
      load_row(p_.q, p_.q_dtype, from, p_.q_layout.dim_stride, p_.head_dim, row);
      if (unit_.angles != nullptr) {
        rotate(p_.rope, unit_.angles[p_.batch.token_offsets[unit_.b] + i], row);
      }
      if (direct) continue;
      float* block = state.q + r / kPackedRows * kPackedRows * q_stride_ + r % kPackedRows;
      for (std::int32_t e = 0; e < p_.head_dim; ++e) block[e * kPackedRows] = row[e];
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
      factors[r] = step(logits_of(h, row), spans[r], scores + r * kKeyTile, state.max[row],
                        state.sum + row * kMaxLanes);
    }
  }

  template <int kRows>
  void score_rows(std::int32_t h, const float* q, float* scores, Ahead& ahead) {
    const Span seen = tile().seen;
#if OCTAVO_HAS_PRODUCTS
    if constexpr (std::is_same_v<ElementsT, Bf16Elements>) {
      if (products_) {
        return score_products<kRows>(reinterpret_cast<const std::uint16_t*>(q), 2 * q_stride_,
                                     keys(h), seen.begin, seen.end, p_.head_dim, scores, ahead);
      }
    }
#endif
    score_direct<ElementsT, kRows>(q, q_stride_, keys(h), seen.begin, seen.end, p_.head_dim, scores,
                                   ahead);
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
      weigh<ElementsT, Sums::Merge, 1, kDirectVectors>(scores + r * kKeyTile, v, spans[r].begin,
                                                       spans[r].end, p_.head_dim_v, factors + r,
                                                       to + r * v_stride_, v_stride_, ahead);
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
  [[nodiscard]] std::int64_t score_steps() const {
    const std::int64_t fours = (tile().seen.end + 3) / 4 - tile().seen.begin / 4;
    return fours * std::max<std::int64_t>(1, p_.head_dim / (products_ ? 2 * kLanes : kLanes));
  }
  [[nodiscard]] std::int64_t weigh_steps() const {
    constexpr std::int64_t kPass = kDirectVectors * kLanes;
    const std::int64_t passes =
        p_.head_dim_v / kPass + (p_.head_dim_v % kPass + kLanes - 1) / kLanes;
    return (tile().seen.end - tile().seen.begin) * passes;
  }

  // Scores and weights of all rows of a run of heads, then their sums.
  void direct_run(std::int32_t first_head, std::int32_t end_head) {
    Span spans[kDirectRows];
    const bool same = find_spans(0, static_cast<int>(rows_), spans);
    const std::int64_t heads = end_head - first_head;
    const std::int64_t blocks = (rows_ + kDirectBlock - 1) / kDirectBlock;
    Ahead values_ahead = walk_.values(first_head, end_head);
    values_ahead.pace(heads * blocks * score_steps());
    for (std::int32_t h = first_head; h < end_head; ++h) {
      const HeadRows state = head_rows(h);
      const std::int64_t at = (h - first_head) * rows_;
      for_blocks([&](std::int64_t first, auto count) {
        float* scores = scratch_.scores + (at + first) * kKeyTile;
        score_rows<count()>(h, state.q + first * q_stride_, scores, values_ahead);
        soften_rows(h, first, count(), state, spans + first, scores, scratch_.factors + at + first);
      });
    }
    values_ahead.finish();
    Ahead keys_ahead = walk_.keys_after(end_head);
    keys_ahead.pace(heads * blocks * weigh_steps());
    for (std::int32_t h = first_head; h < end_head; ++h) {
      const HeadRows state = head_rows(h);
      const std::int64_t at = (h - first_head) * rows_;
      for_blocks([&](std::int64_t first, auto count) {
        weigh_rows<count()>(spans + first, same, scratch_.scores + (at + first) * kKeyTile,
                            values(h), scratch_.factors + at + first,
                            state.weighted + first * v_stride_, keys_ahead);
      });
    }
    keys_ahead.finish();
  }

  void packed_tile(std::int32_t h, const HeadRows& state) {
    pack_keys<ElementsT>(keys(h), p_.head_dim, scratch_.k_packed);
    pack_values<ElementsT>(values(h), tile().seen.begin, tile().seen.end, p_.head_dim_v,
                           scratch_.v_packed, v_stride_);
    Ahead keys_ahead = walk_.next_keys(), values_ahead = walk_.next_values();
    keys_ahead.pace(padded_rows(rows_));
    values_ahead.pace(padded_rows(rows_));
    for (std::int64_t first = 0; first < rows_; first += kPackedRows) {
      for (int r = 0; r < kPackedRows; ++r) {
        keys_ahead.step();
        values_ahead.step();
      }
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
        finish_row(p_, unit_.b, token_of(r), head, row);
        continue;
      }
      const std::int64_t to =
          (unit_.first_partial_row + r / group_ * unit_.partial_row_step) * p_.num_q_heads + head;
      std::copy_n(row.weighted, p_.head_dim_v, unit_.partials->weighted + to * p_.head_dim_v);
      unit_.partials->max[to] = row.max;
      unit_.partials->sum[to] = sum;
    }
  }

  const Unit& unit_;
  const AttendParams& p_;
  const UnitScratch& scratch_;
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
