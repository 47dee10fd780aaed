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
#include <limits>

#include "kernels/cpu/key_tile.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/output.h"
#include "kernels/cpu/tile-inl.h"
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
      s = hn::Mul(cap, Tanh(d, hn::Div(s, cap)));
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
  const float factor = max == new_max ? 1.0F : hn::GetLane(Exp(d, hn::Set(d, max - reference)));
  FloatVec total = hn::Zero(d);
  OCTAVO_UNROLL_4
  for (std::int64_t at = 0; at < kKeyTile; at += kLanes) {
    const FloatVec weight = Exp(d, hn::Sub(hn::Load(d, scores + at), hn::Set(d, reference)));
    hn::Store(weight, d, scores + at);
    total = hn::Add(total, weight);
  }
  hn::Store(hn::MulAdd(hn::Load(d, sum), hn::Set(d, factor), total), d, sum);
  max = new_max;
  return factor;
}

// The products with a packed tile's V of kPackedRows rows that see different keys: those that all
// see together, what a row sees before and behind them by itself. A hidden key's value enters no
// product, not even with weight 0: it could be NaN.
inline void weigh_packed_rows(const Span* spans, const float* weights, const DenseRows& v,
                              std::int64_t dim, const float* factors, float* to,
                              std::int64_t to_stride, float* part) {
  constexpr int kVectors = kPackedVectors;
  Span common = spans[0];
  for (int r = 1; r < kPackedRows; ++r) {
    common.begin = std::max(common.begin, spans[r].begin);
    common.end = std::min(common.end, spans[r].end);
  }
  if (common.empty()) common = Span{kKeyTile, kKeyTile};
  std::fill_n(part, kPackedRows * to_stride, 0.0F);
  for (int r = 0; r < kPackedRows; ++r) {
    weigh<F32Elements, Sums::Extend, 1, kVectors>(weights + r * kKeyTile, v, spans[r].begin,
                                                  std::min(spans[r].end, common.begin), dim,
                                                  nullptr, part + r * to_stride, to_stride, {});
  }
  weigh<F32Elements, Sums::Extend, kPackedRows, kVectors>(weights, v, common.begin, common.end, dim,
                                                          nullptr, part, to_stride, {});
  for (int r = 0; r < kPackedRows; ++r) {
    weigh<F32Elements, Sums::Extend, 1, kVectors>(
        weights + r * kKeyTile, v, std::max(spans[r].begin, common.end), spans[r].end, dim, nullptr,
        part + r * to_stride, to_stride, {});
  }
  const FloatTag d;
  for (int r = 0; r < kPackedRows; ++r) {
    const FloatVec factor = hn::Set(d, factors[r]);
    for (std::int64_t at = r * to_stride; at < (r + 1) * to_stride; at += kLanes) {
      hn::Store(hn::MulAdd(hn::Load(d, to + at), factor, hn::Load(d, part + at)), d, to + at);
    }
  }
}

template <class Elements>
class UnitKernel {
  using T = typename Elements::T;

 public:
  explicit UnitKernel(const Unit& unit)
      : unit_(unit),
        p_(*unit.params),
        scratch_(*unit.scratch),
        group_(p_.num_q_heads / p_.num_kv_heads),
        rows_(unit.num_tokens * group_),
        q_stride_(padded(p_.head_dim)),
        v_stride_(padded(p_.head_dim_v)) {}

  void run() {
    const bool direct = rows_ <= kDirectRows;
    if (direct) {
      find_first_tile(unit_.first_head);
      for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) start_head(h, head_rows(h));
      for (std::int64_t t = unit_.first_key_tile; t < unit_.end_key_tile; ++t) {
        enter_tile(t);
        if (tile().seen.empty()) continue;
        for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) direct_tile(h);
      }
      for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) end_head(h, head_rows(h));
      return;
    }
    for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) {
      const HeadRows rows{scratch_.q, scratch_.weighted, scratch_.sum, scratch_.max};
      find_first_tile(h);
      start_head(h, rows);
      for (std::int64_t t = unit_.first_key_tile; t < unit_.end_key_tile; ++t) {
        enter_tile(t);
        if (!tile().seen.empty()) packed_tile(h, rows);
      }
      end_head(h, rows);
    }
  }

 private:
  [[nodiscard]] const KeyTile& tile() const { return tiles_[current_]; }
  [[nodiscard]] const KeyTile& next_tile() const { return tiles_[1 - current_]; }

  // Looks up the unit's first tile and fetches its keys, while the queries are made ready.
  void find_first_tile(std::int32_t h) {
    if (unit_.first_key_tile >= unit_.end_key_tile) return;
    locate(unit_, unit_.first_key_tile, tiles_[current_]);
    const Ahead keys = keys_ahead(tile(), h);
    for (std::int64_t key = keys.begin; key < keys.end; ++key) keys.fetch(key);
  }

  // Makes tile `t` the current one and looks up the one behind it, for its rows to be fetched
  // early.
  void enter_tile(std::int64_t t) {
    if (t != unit_.first_key_tile) current_ = 1 - current_;
    KeyTile& next = tiles_[1 - current_];
    next.seen = {};
    if (t + 1 < unit_.end_key_tile) locate(unit_, t + 1, next);
  }

  [[nodiscard]] Ahead ahead(const PagedTensor& tensor, const std::int64_t* offsets,
                            std::int64_t dim, Span keys, std::int32_t h) const {
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T));
    return {static_cast<const char*>(tensor.data) + h * tensor.head_stride * kBytes,
            offsets,
            kBytes,
            dim * kBytes,
            keys.begin,
            keys.end};
  }
  [[nodiscard]] Ahead values_ahead(const KeyTile& of, std::int32_t h) const {
    return ahead(p_.kv.v, of.v_offsets, p_.head_dim_v, of.seen, h);
  }
  [[nodiscard]] Ahead keys_ahead(const KeyTile& of, std::int32_t h) const {
    return ahead(p_.kv.k, of.k_offsets, p_.head_dim, of.seen, h);
  }
  // The keys that direct_tile wants after those of head `h`.
  [[nodiscard]] Ahead keys_after(std::int32_t h) const {
    return h + 1 < unit_.end_head ? keys_ahead(tile(), h + 1)
                                  : keys_ahead(next_tile(), unit_.first_head);
  }

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
    const bool direct = rows_ <= kDirectRows;
    const std::int64_t rows = direct ? rows_ : padded_rows(rows_);
    std::fill_n(state.q, rows * q_stride_, 0.0F);
    std::fill_n(state.weighted, rows * v_stride_, 0.0F);
    std::fill_n(state.sum, rows * kMaxLanes, 0.0F);
    std::fill_n(state.max, rows, kNothing);
    for (std::int64_t r = 0; r < rows_; ++r) {
      const std::int32_t i = token_of(r);
      const std::int64_t from = token_offset(p_.q_layout, p_.batch, unit_.b, i) +
                                q_head_of(h, r) * p_.q_layout.head_stride;
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

  // Softmax step of `count` rows from `first` on, whose scores are in the scratch. Returns whether
  // they all see the same keys, `spans` and `factors` say which and how much what came before
  // shrinks.
  bool soften_rows(std::int32_t h, std::int64_t first, int count, const HeadRows& state,
                   Span* spans, float* factors) {
    bool same = true;
    const bool whole = tile().uniform && tile().seen == Span{0, kKeyTile};
    for (int r = 0; r < count; ++r) {
      const std::int64_t row = first + r;
      spans[r] = tile().uniform ? tile().seen : clip(keys_of(unit_, token_of(row)), tile().first);
      same = same && spans[r] == spans[0];
      const auto step = whole ? soften<false> : soften<true>;
      factors[r] = step(logits_of(h, row), spans[r], scratch_.scores + r * kKeyTile, state.max[row],
                        state.sum + row * kMaxLanes);
    }
    return same;
  }

  // Of a tile's blocks the first one fetches ahead.
  template <int kRows>
  void direct_block(std::int32_t h, std::int64_t first, const HeadRows& state) {
    Span spans[kDirectBlock];
    float factors[kDirectBlock];
    score_direct<Elements, kRows>(state.q + first * q_stride_, q_stride_, keys(h),
                                  tile().seen.begin, tile().seen.end, p_.head_dim, scratch_.scores,
                                  first == 0 ? values_ahead(tile(), h) : Ahead{});
    const bool same = soften_rows(h, first, kRows, state, spans, factors);
    const Ahead next = first == 0 ? keys_after(h) : Ahead{};
    const PageRows<T> v = values(h);
    float* to = state.weighted + first * v_stride_;
    if (same) {
      weigh<Elements, Sums::Merge, kRows, kDirectVectors>(scratch_.scores, v, spans[0].begin,
                                                          spans[0].end, p_.head_dim_v, factors, to,
                                                          v_stride_, next);
      return;
    }
    for (int r = 0; r < kRows; ++r) {
      weigh<Elements, Sums::Merge, 1, kDirectVectors>(
          scratch_.scores + r * kKeyTile, v, spans[r].begin, spans[r].end, p_.head_dim_v,
          factors + r, to + r * v_stride_, v_stride_, {});
    }
  }

  void direct_tile(std::int32_t h) {
    const HeadRows state = head_rows(h);
    std::int64_t first = 0;
    for (; first + kDirectBlock <= rows_; first += kDirectBlock) {
      direct_block<kDirectBlock>(h, first, state);
    }
    const std::int64_t left = rows_ - first;
    if constexpr (kDirectBlock > 3) {
      if (left == 3) return direct_block<3>(h, first, state);
    }
    if constexpr (kDirectBlock > 2) {
      if (left == 2) return direct_block<2>(h, first, state);
    }
    if (left == 1) direct_block<1>(h, first, state);
  }

  void packed_tile(std::int32_t h, const HeadRows& state) {
    pack_keys<Elements>(keys(h), p_.head_dim, scratch_.k_packed);
    pack_values<Elements>(values(h), tile().seen.begin, tile().seen.end, p_.head_dim_v,
                          scratch_.v_packed, v_stride_);
    const Ahead next_keys = keys_ahead(next_tile(), h), next_values = values_ahead(next_tile(), h);
    const std::int64_t step = kKeyTile * kPackedRows / padded_rows(rows_) + 1;
    std::int64_t fetched = 0;
    for (std::int64_t first = 0; first < rows_; first += kPackedRows) {
      for (const std::int64_t stop = fetched + step; fetched < stop; ++fetched) {
        next_keys.fetch(fetched);
        next_values.fetch(fetched);
      }
      if (!tile().uniform && block_sees_nothing(first)) continue;
      score_packed(state.q + first * q_stride_, scratch_.k_packed, p_.head_dim, scratch_.scores);
      finish_packed(h, first, state);
    }
  }

  void finish_packed(std::int32_t h, std::int64_t first, const HeadRows& state) {
    Span spans[kPackedRows];
    float factors[kPackedRows];
    const bool same = soften_rows(h, first, kPackedRows, state, spans, factors);
    const DenseRows v{scratch_.v_packed, v_stride_};
    float* to = state.weighted + first * v_stride_;
    if (same) {
      weigh<F32Elements, Sums::Merge, kPackedRows, kPackedVectors>(
          scratch_.scores, v, spans[0].begin, spans[0].end, p_.head_dim_v, factors, to, v_stride_,
          {});
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
  int current_ = 0;
  KeyTile tiles_[2];  // the one worked on and the next
};

}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
