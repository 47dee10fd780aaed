// SPDX-License-Identifier: Apache-2.0
// What both ways of the tiled attention do with a unit's rows, for each of Highway's targets: their
// queries, what they see of a tile, softmax steps, their end.

#if defined(OCTAVO_KERNELS_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTAVO_KERNELS_CPU_ROWS_INL_H_
#undef OCTAVO_KERNELS_CPU_ROWS_INL_H_
#else
#define OCTAVO_KERNELS_CPU_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/finish-inl.h"
#include "kernels/cpu/key_tile.h"
#include "kernels/cpu/products-inl.h"
#include "kernels/cpu/soften-inl.h"
#include "kernels/cpu/tile-inl.h"
#include "kernels/cpu/tile_walk.h"
#include "kernels/cpu/unit.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The state of one KV head's rows.
struct HeadRows {
  float* q;
  float* weighted;
  float* sum;
  float* max;
};

template <class ElementsT>
class UnitRows {
 protected:
  using T = typename ElementsT::T;

  explicit UnitRows(const Unit& unit)
      : unit_(unit),
        p_(*unit.params),
        scratch_(*unit.scratch),
        group_(p_.num_q_heads / p_.num_kv_heads),
        rows_(std::int64_t{unit.num_tokens} * group_),
        q_stride_(padded(p_.head_dim)),
        v_stride_(padded(p_.head_dim_v)),
        products_(std::is_same_v<ElementsT, Bf16Elements> && is_direct(unit) &&
                  p_.q_dtype == DType::BF16 && unit.angles == nullptr && has_products()) {}

  [[nodiscard]] std::int32_t token_of(std::int64_t row) const {
    return unit_.first_token +
           static_cast<std::int32_t>(std::min<std::int64_t>(row, rows_ - 1) / group_);
  }
  [[nodiscard]] std::int32_t q_head_of(std::int32_t h, std::int64_t row) const {
    return h * group_ + static_cast<std::int32_t>(row % group_);
  }
  [[nodiscard]] PageRows<T> keys(std::int32_t h, const KeyTile& tile) const {
    return {static_cast<const T*>(p_.kv.k.data) + h * p_.kv.k.head_stride, tile.k_offsets};
  }
  [[nodiscard]] PageRows<T> values(std::int32_t h, const KeyTile& tile) const {
    return {static_cast<const T*>(p_.kv.v.data) + h * p_.kv.v.head_stride, tile.v_offsets};
  }

  void clear(const HeadRows& state, std::int64_t rows) const {
    std::fill_n(state.weighted, rows * v_stride_, 0.0F);
    std::fill_n(state.sum, rows * kMaxLanes, 0.0F);
    std::fill_n(state.max, rows, kNothing);
  }

  // A row of q, of no more than its own elements, to whole vectors of floats.
  template <class QueryT>
  void widen(std::int64_t from, float* row) const {
    const FloatTag d;
    const auto* q = static_cast<const typename QueryT::T*>(p_.q) + from;
    std::int64_t at = 0;
    for (; at + kLanes <= p_.head_dim; at += kLanes)
      hn::Store(QueryT::load(d, q + at), d, row + at);
    if (at < p_.head_dim) hn::Store(load_tail<QueryT>(d, q + at, p_.head_dim - at), d, row + at);
  }

  void copy_bits(const std::uint16_t* from, std::uint16_t* to) const {
    const std::int64_t stride = p_.q_layout.dim_stride;
    if (stride == 1) {
      std::copy_n(from, p_.head_dim, to);
      return;
    }
    for (std::int32_t e = 0; e < p_.head_dim; ++e) to[e] = from[e * stride];
  }

  void load_query(std::int64_t from, float* row) const {
    const std::int64_t stride = p_.q_layout.dim_stride;
    if (stride != 1) return load_row(p_.q, p_.q_dtype, from, stride, p_.head_dim, row);
    switch (p_.q_dtype) {
      case DType::F16:
        return widen<F16Elements>(from, row);
      case DType::BF16:
        return widen<Bf16Elements>(from, row);
      default:
        return widen<F32Elements>(from, row);
    }
  }

  // Loads and rotates the head's queries, in the layout that its way wants.
  void load_queries(std::int32_t h, float* q, Ahead& ahead) {
    const bool direct = is_direct(unit_);
    std::fill_n(q, (direct ? rows_ : padded_rows(rows_)) * q_stride_, 0.0F);
    for (std::int64_t r = 0; r < rows_; ++r) {
      ahead.step();
      const std::int32_t i = token_of(r);
      const std::int64_t from = token_offset(p_.q_layout, p_.batch, unit_.b, i) +
                                q_head_of(h, r) * p_.q_layout.head_stride;
      float* row = direct ? q + r * q_stride_ : scratch_.row;
      if (products_) {  // as it is
        copy_bits(static_cast<const std::uint16_t*>(p_.q) + from,
                  reinterpret_cast<std::uint16_t*>(row));
        continue;
      }
      load_query(from, row);
      if (unit_.angles != nullptr) {
        rotate(p_.rope, unit_.angles[p_.batch.token_offsets[unit_.b] + i], row);
      }
      if (direct) continue;
      float* block = q + r / kPackedRows * kPackedRows * q_stride_ + r % kPackedRows;
      for (std::int32_t e = 0; e < p_.head_dim; ++e) block[std::int64_t{e} * kPackedRows] = row[e];
    }
  }

  [[nodiscard]] Logits logits_of(std::int32_t h, std::int64_t row, const KeyTile& tile) const {
    Logits result{p_.scale, p_.softcap, 0.0F, 0.0F};
    if (p_.alibi_slopes != nullptr) {
      result.slope = p_.alibi_slopes[q_head_of(h, row)];
      result.distance =
          static_cast<float>(position_of(p_.batch, unit_.b, token_of(row)) - tile.first);
    }
    return result;
  }

  // What rows [first, first + count) see. Returns whether it is the same for all.
  bool find_spans(const KeyTile& tile, std::int64_t first, int count, Span* spans) const {
    bool same = true;
    for (int r = 0; r < count; ++r) {
      spans[r] = tile.uniform ? tile.seen : clip(keys_of(unit_, token_of(first + r)), tile.first);
      same = same && spans[r] == spans[0];
    }
    return same;
  }

  // Softmax step of `count` rows from `first` on. `factors` say how much what came before shrinks.
  void soften_rows(const KeyTile& tile, std::int32_t h, std::int64_t first, int count,
                   const HeadRows& state, const Span* spans, float* scores, float* factors) {
    const bool whole = tile.uniform && tile.seen == Span{0, kKeyTile};
    const auto step = whole ? soften<false> : soften<true>;
    for (int r = 0; r < count; ++r) {
      const std::int64_t row = first + r;
      factors[r] = step(logits_of(h, row, tile), spans[r], scores + std::int64_t{r} * kKeyTile,
                        state.max[row], state.sum + row * kMaxLanes);
    }
  }

  // Where the partial of a row goes, counted in rows of a head.
  [[nodiscard]] std::int64_t partial_of(std::int32_t h, std::int64_t row) const {
    return (unit_.first_partial_row + row / group_ * unit_.num_splits + unit_.split) *
               p_.num_q_heads +
           q_head_of(h, row);
  }

  // Takes the lines that end_head writes from the thread that read them last: one by one, in the
  // order of the stores, that takes longer than the sums do.
  void reserve_partials(std::int32_t h) const {
    if (unit_.partials == nullptr) return;
    for (std::int64_t r = 0; r < rows_; ++r)
      prefetch_row<true>(unit_.partials->weighted + partial_of(h, r) * v_stride_, v_stride_);
  }

  void end_head(std::int32_t h, const HeadRows& state) const {
    for (std::int64_t r = 0; r < rows_; ++r) {
      float sum = 0.0F;
      for (std::int64_t lane = 0; lane < kLanes; ++lane) sum += state.sum[r * kMaxLanes + lane];
      const RowState<float> row{state.weighted + r * v_stride_, state.max[r], sum};
      if (unit_.partials == nullptr) {
        finish_wide_row(p_, unit_.b, token_of(r), q_head_of(h, r), row);
        continue;
      }
      const std::int64_t to = partial_of(h, r);
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
};

}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
