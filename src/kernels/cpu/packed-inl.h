// SPDX-License-Identifier: Apache-2.0
// The packed way, for each of Highway's targets: K transposed to [dim, key] and V to dense rows,
// both F32; the lanes of scores are keys, so that no sum needs a reduction.

#if defined(OCTAVO_KERNELS_CPU_PACKED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTAVO_KERNELS_CPU_PACKED_INL_H_
#undef OCTAVO_KERNELS_CPU_PACKED_INL_H_
#else
#define OCTAVO_KERNELS_CPU_PACKED_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/key_tile.h"
#include "kernels/cpu/tile-inl.h"
#include "kernels/cpu/tile_walk.h"
#include "kernels/cpu/unit.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A packed tile's rows.
struct DenseRows {
  const float* base;
  std::int64_t stride;
  HWY_INLINE const float* operator()(std::int64_t key) const { return base + key * stride; }
};

#if HWY_TARGET != HWY_SCALAR
// Writes the 128-bit blocks of a vector to `to`, four rows of the packed tile apart.
template <class D, class V>
HWY_INLINE void store_blocks(D d, V v, float* to) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    hn::StoreU(v, d, to);
  } else {
    const hn::Half<D> half;
    store_blocks(half, hn::LowerHalf(half, v), to);
    store_blocks(half, hn::UpperHalf(half, v),
                 to + static_cast<std::int64_t>(hn::MaxLanes(half)) * kKeyTile);
  }
}
#endif

// Packs K to [dim, kKeyTile]: 4 x 4 transposes inside the 128-bit blocks.
template <class ElementsT, class RowsT>
HWY_NOINLINE void pack_keys(const RowsT& k, std::int64_t dim, float* to) {
  const FloatTag d;
  for (std::int64_t key = 0; key < kKeyTile; key += 4) {
    for (std::int64_t at = 0; at < dim; at += kLanes) {
      FloatVec in[4];
      OCTAVO_UNROLL
      for (int j = 0; j < 4; ++j) {
        const typename ElementsT::T* row = k(key + j) + at;
        in[j] =
            dim - at >= kLanes ? ElementsT::load(d, row) : load_tail<ElementsT>(d, row, dim - at);
      }
      float* place = to + at * kKeyTile + key;
#if HWY_TARGET == HWY_SCALAR
      for (int j = 0; j < 4; ++j) hn::Store(in[j], d, place + j);
#else
      const FloatVec low02 = hn::InterleaveLower(d, in[0], in[2]);
      const FloatVec high02 = hn::InterleaveUpper(d, in[0], in[2]);
      const FloatVec low13 = hn::InterleaveLower(d, in[1], in[3]);
      const FloatVec high13 = hn::InterleaveUpper(d, in[1], in[3]);
      store_blocks(d, hn::InterleaveLower(d, low02, low13), place);
      store_blocks(d, hn::InterleaveUpper(d, low02, low13), place + kKeyTile);
      store_blocks(d, hn::InterleaveLower(d, high02, high13), place + 2 * kKeyTile);
      store_blocks(d, hn::InterleaveUpper(d, high02, high13), place + 3 * kKeyTile);
#endif
    }
  }
}

// Packs rows [begin, end) of V densely, zero-padded to whole vectors.
template <class ElementsT, class RowsT>
HWY_NOINLINE void pack_values(const RowsT& v, std::int64_t begin, std::int64_t end,
                              std::int64_t dim, float* to, std::int64_t to_stride) {
  const FloatTag d;
  for (std::int64_t key = begin; key < end; ++key) {
    const typename ElementsT::T* row = v(key);
    float* place = to + key * to_stride;
    std::int64_t at = 0;
    for (; at + kLanes <= dim; at += kLanes) hn::Store(ElementsT::load(d, row + at), d, place + at);
    if (at < dim) hn::Store(load_tail<ElementsT>(d, row + at, dim - at), d, place + at);
  }
}

// Scores of kPackedRows interleaved rows of q against a whole packed tile.
HWY_NOINLINE inline void score_packed(const float* HWY_RESTRICT q, const float* HWY_RESTRICT k,
                                      std::int64_t dim, float* HWY_RESTRICT scores) {
  const FloatTag d;
  constexpr std::int64_t kStep = kPackedVectors * kLanes;
  for (std::int64_t key = 0; key < kKeyTile; key += kStep) {
    FloatVec sums[kPackedRows][kPackedVectors];
    OCTAVO_UNROLL
    for (int r = 0; r < kPackedRows; ++r) {
      OCTAVO_UNROLL
      for (int c = 0; c < kPackedVectors; ++c) sums[r][c] = hn::Zero(d);
    }
    for (std::int64_t i = 0; i < dim; ++i) {
      FloatVec keys[kPackedVectors];
      OCTAVO_UNROLL
      for (int c = 0; c < kPackedVectors; ++c) {
        keys[c] = hn::Load(d, k + i * kKeyTile + key + c * kLanes);
      }
      OCTAVO_UNROLL
      for (int r = 0; r < kPackedRows; ++r) {
        const FloatVec query = hn::Set(d, q[i * kPackedRows + r]);
        OCTAVO_UNROLL
        for (int c = 0; c < kPackedVectors; ++c) {
          sums[r][c] = hn::MulAdd(query, keys[c], sums[r][c]);
        }
      }
    }
    OCTAVO_UNROLL
    for (int r = 0; r < kPackedRows; ++r) {
      OCTAVO_UNROLL
      for (int c = 0; c < kPackedVectors; ++c) {
        hn::Store(sums[r][c], d, scores + r * kKeyTile + key + c * kLanes);
      }
    }
  }
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
  Ahead none;
  std::fill_n(part, kPackedRows * to_stride, 0.0F);
  for (int r = 0; r < kPackedRows; ++r) {
    weigh<F32Elements, Sums::Extend, 1, kVectors>(weights + r * kKeyTile, v, spans[r].begin,
                                                  std::min(spans[r].end, common.begin), dim,
                                                  nullptr, part + r * to_stride, to_stride, none);
  }
  weigh<F32Elements, Sums::Extend, kPackedRows, kVectors>(weights, v, common.begin, common.end, dim,
                                                          nullptr, part, to_stride, none);
  for (int r = 0; r < kPackedRows; ++r) {
    weigh<F32Elements, Sums::Extend, 1, kVectors>(
        weights + r * kKeyTile, v, std::max(spans[r].begin, common.end), spans[r].end, dim, nullptr,
        part + r * to_stride, to_stride, none);
  }
  const FloatTag d;
  for (int r = 0; r < kPackedRows; ++r) {
    const FloatVec factor = hn::Set(d, factors[r]);
    for (std::int64_t at = r * to_stride; at < (r + 1) * to_stride; at += kLanes) {
      hn::Store(hn::MulAdd(hn::Load(d, to + at), factor, hn::Load(d, part + at)), d, to + at);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
