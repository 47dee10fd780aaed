// SPDX-License-Identifier: Apache-2.0
// Works off one unit of the tiled attention, for each of Highway's targets: online softmax over key
// tiles (Milakov and Gimelshein 2018; Dao et al. 2022), K and V read through the page table. Few
// rows take the direct way, many the packed one, which is here; which is decided by the item alone.

#if defined(OCTAVO_KERNELS_CPU_ATTEND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTAVO_KERNELS_CPU_ATTEND_INL_H_
#undef OCTAVO_KERNELS_CPU_ATTEND_INL_H_
#else
#define OCTAVO_KERNELS_CPU_ATTEND_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "kernels/cpu/direct-inl.h"
#include "kernels/cpu/packed-inl.h"
#include "kernels/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class ElementsT>
class PackedKernel : UnitRows<ElementsT> {
  using Base = UnitRows<ElementsT>;
  using Base::p_, Base::q_stride_, Base::rows_, Base::scratch_, Base::unit_, Base::v_stride_;

 public:
  explicit PackedKernel(const Unit& unit) : Base(unit), walk_(unit) {}

  void run() {
    scratch_.q_token = -1;
    for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) {
      const HeadRows rows{scratch_.q, scratch_.weighted, scratch_.sum, scratch_.max};
      walk_.start(h, h + 1);
      this->clear(rows, padded_rows(rows_));
      Ahead none;
      this->load_queries(h, rows.q, none);
      for (std::int64_t t = unit_.first_key_tile; t < unit_.end_key_tile; ++t) {
        walk_.enter(t);
        if (!tile().seen.empty()) packed_tile(h, rows);
      }
      this->end_head(h, rows);
    }
  }

 private:
  [[nodiscard]] const KeyTile& tile() const { return walk_.tile(); }

  void packed_tile(std::int32_t h, const HeadRows& state) {
    pack_keys<ElementsT>(this->keys(h, tile()), p_.head_dim, scratch_.k_packed);
    pack_values<ElementsT>(this->values(h, tile()), tile().seen.begin, tile().seen.end,
                           p_.head_dim_v, scratch_.v_packed, v_stride_);
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
    const bool same = this->find_spans(tile(), first, kPackedRows, spans);
    this->soften_rows(tile(), h, first, kPackedRows, state, spans, scratch_.scores, factors);
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
    const KeyRange from = keys_of(unit_, this->token_of(first));
    const KeyRange to = keys_of(unit_, this->token_of(first + kPackedRows - 1));
    return clip({from.begin, to.end}, tile().first).empty();
  }

  TileWalk walk_;
};

template <class ElementsT>
void attend_unit(const Unit& unit) {
  if (is_direct(unit)) {
    DirectKernel<ElementsT>(unit).run();
  } else {
    PackedKernel<ElementsT>(unit).run();
  }
  if (unit.partials != nullptr && finish_split(unit)) combine_rows(unit, unit.scratch->row);
}

}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
