// SPDX-License-Identifier: Apache-2.0
// The products of one key tile, for each of Highway's targets: scores = Q K^T of the direct way (K
// rows in place, a few query rows; lanes are dims, four keys reduced together) and weighted sums of
// V, whose lanes are dims in both ways. The order of sums depends on nothing but the row.

#if defined(OCTAVO_KERNELS_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTAVO_KERNELS_CPU_TILE_INL_H_
#undef OCTAVO_KERNELS_CPU_TILE_INL_H_
#else
#define OCTAVO_KERNELS_CPU_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/convert.h"
#include "kernels/cpu/tile_walk.h"
#include "kernels/cpu/unit.h"

// Accumulators are arrays of vectors: without full unrolling they would live in memory.
#ifndef OCTAVO_UNROLL
#if defined(__clang__)
#define OCTAVO_UNROLL _Pragma("clang loop unroll(full)")
#define OCTAVO_UNROLL_4 _Pragma("clang loop unroll_count(4)")
#else
#define OCTAVO_UNROLL _Pragma("GCC unroll 16")
#define OCTAVO_UNROLL_4 _Pragma("GCC unroll 4")
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::CappedTag<float, kMaxLanes>;
using FloatVec = hn::Vec<FloatTag>;
constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(FloatTag()));

// AVX-512 and NEON have 32 vector registers, the others 16.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kDirectBlock = 4;    // query rows
constexpr int kPackedVectors = 4;  // of keys or dims
#else
constexpr int kDirectBlock = 2;
constexpr int kPackedVectors = 2;
#endif
constexpr int kDirectVectors = 4;

template <int kCount>
using VecRow = FloatVec[static_cast<std::size_t>(kCount)];
template <int kRows, int kColumns>
using VecGrid = VecRow<kColumns>[static_cast<std::size_t>(kRows)];

// How elements of the cache become float vectors.
struct F32Elements {
  using T = float;
  static HWY_INLINE FloatVec load(FloatTag d, const T* from) { return hn::LoadU(d, from); }
};
struct F16Elements {
  using T = std::uint16_t;
  static HWY_INLINE FloatVec load(FloatTag d, const T* from) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
    // Highway 1.0.3's portable widening makes 65536 of infinity and numbers of NaN.
    float wide[kLanes];
    for (std::int64_t i = 0; i < kLanes; ++i) wide[i] = base::f16_to_float(from[i]);
    return hn::LoadU(d, wide);
#else
    const hn::Rebind<hwy::float16_t, FloatTag> dh;
    const hn::Rebind<std::uint16_t, FloatTag> du;
    return hn::PromoteTo(d, hn::BitCast(dh, hn::LoadU(du, from)));
#endif
  }
};
struct Bf16Elements {
  using T = std::uint16_t;
  static HWY_INLINE FloatVec load(FloatTag d, const T* from) {
    const hn::Rebind<std::uint16_t, FloatTag> du16;
    const hn::RebindToUnsigned<FloatTag> du32;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, from))));
  }
};

// Whether two vectors are loaded faster together.
template <class ElementsT>
constexpr bool kPairs = HWY_TARGET == HWY_AVX3&& std::is_same_v<ElementsT, Bf16Elements>;

// `kVectors` vectors in a row.
template <class ElementsT, int kVectors>
HWY_INLINE void load_row_of(FloatTag d, const typename ElementsT::T* from,
                            VecRow<kVectors>& vectors) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (kPairs<ElementsT> && kVectors % 2 == 0) {
    // Words to upper halves, zeros below: one instruction where widening and shifting are two, on
    // ports that multiply-adds want.
    const __m512i low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i words = _mm512_slli_epi32(low, 16);
    const __m512i upper_words = _mm512_add_epi32(words, _mm512_set1_epi32(16 << 16));
    constexpr __mmask32 kUpper = 0xAAAAAAAAU;
    OCTAVO_UNROLL
    for (int c = 0; c < kVectors; c += 2) {
      const __m512i both = _mm512_loadu_si512(from + c * kLanes);
      vectors[c] =
          FloatVec{_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(kUpper, words, both))};
      vectors[c + 1] =
          FloatVec{_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(kUpper, upper_words, both))};
    }
    return;
  }
#endif
  OCTAVO_UNROLL
  for (int c = 0; c < kVectors; ++c) vectors[c] = ElementsT::load(d, from + c * kLanes);
}

// The last `count` < kLanes elements of a row, zeros behind them. Nothing behind the row is read.
template <class ElementsT>
HWY_INLINE FloatVec load_tail(FloatTag d, const typename ElementsT::T* from, std::int64_t count) {
  typename ElementsT::T buffer[kMaxLanes] = {};
  std::memcpy(buffer, from, static_cast<std::size_t>(count) * sizeof(buffer[0]));
  return ElementsT::load(d, buffer);
}

// Writes the sums of the lanes of four vectors to to[0..3].
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void store_sums(FloatTag d, FloatVec a, FloatVec b, FloatVec c, FloatVec e, float* to) {
  hn::Store(a, d, to);
  hn::Store(b, d, to + 1);
  hn::Store(c, d, to + 2);
  hn::Store(e, d, to + 3);
}
#else
template <class D, class V>
HWY_INLINE auto sum_blocks([[maybe_unused]] D d, V v) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return sum_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

HWY_INLINE void store_sums(FloatTag d, FloatVec a, FloatVec b, FloatVec c, FloatVec e, float* to) {
  const FloatVec ac = hn::Add(hn::InterleaveLower(d, a, c), hn::InterleaveUpper(d, a, c));
  const FloatVec be = hn::Add(hn::InterleaveLower(d, b, e), hn::InterleaveUpper(d, b, e));
  const FloatVec all = hn::Add(hn::InterleaveLower(d, ac, be), hn::InterleaveUpper(d, ac, be));
  hn::StoreU(sum_blocks(d, all), hn::CappedTag<float, 4>(), to);
}
#endif

// Keeps a vector that several multiply-adds use in its register: g++ 12 would load it anew for
// each, and loads are then the bound.
template <class V>
HWY_INLINE V in_register(V v) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  asm("" : "+v"(v.raw));
#endif
  return v;
}

// A tile's rows of K or V of one head, in place.
template <typename ElementT>
struct PageRows {
  const ElementT* base;
  const std::int64_t* offsets;  // [kKeyTile]
  HWY_INLINE const ElementT* operator()(std::int64_t key) const { return base + offsets[key]; }
};

// scores[r, key..key+3] = q[r] . k for kRows rows of q [.., q_stride], zero-padded to whole
// vectors.
template <class ElementsT, int kRows, class RowsT>
HWY_INLINE void dot_four_keys(FloatTag d, const float* HWY_RESTRICT q, std::int64_t q_stride,
                              const RowsT& k, std::int64_t key, std::int64_t dim,
                              float* HWY_RESTRICT scores, Ahead& ahead) {
  const typename ElementsT::T* rows[4] = {k(key), k(key + 1), k(key + 2), k(key + 3)};
  VecGrid<kRows, 4> sums;
  OCTAVO_UNROLL
  for (int r = 0; r < kRows; ++r) {
    OCTAVO_UNROLL
    for (int j = 0; j < 4; ++j) sums[r][j] = hn::Zero(d);
  }
  const auto add = [&](std::int64_t at, auto vectors) {
    constexpr int kVectors = vectors();
    VecGrid<kRows, kVectors> queries;
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      OCTAVO_UNROLL
      for (int c = 0; c < kVectors; ++c) {
        queries[r][c] = hn::Load(d, q + r * q_stride + at + c * kLanes);
      }
    }
    OCTAVO_UNROLL
    for (int j = 0; j < 4; ++j) {
      VecRow<kVectors> keys;
      load_row_of<ElementsT, kVectors>(d, rows[j] + at, keys);
      OCTAVO_UNROLL
      for (int c = 0; c < kVectors; ++c) {
        keys[c] = in_register(keys[c]);
        OCTAVO_UNROLL
        for (int r = 0; r < kRows; ++r) {
          sums[r][j] = hn::MulAdd(queries[r][c], keys[c], sums[r][j]);
        }
      }
    }
  };
  std::int64_t at = 0;
  if constexpr (kPairs<ElementsT>) {
    for (; at + 2 * kLanes <= dim; at += 2 * kLanes) {
      ahead.step();
      ahead.step();
      add(at, std::integral_constant<int, 2>());
    }
  }
  for (; at + kLanes <= dim; at += kLanes) {
    ahead.step();
    add(at, std::integral_constant<int, 1>());
  }
  if (at < dim) {
    OCTAVO_UNROLL
    for (int j = 0; j < 4; ++j) {
      const FloatVec keys = load_tail<ElementsT>(d, rows[j] + at, dim - at);
      OCTAVO_UNROLL
      for (int r = 0; r < kRows; ++r) {
        sums[r][j] = hn::MulAdd(hn::Load(d, q + r * q_stride + at), keys, sums[r][j]);
      }
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < kRows; ++r) {
    store_sums(d, sums[r][0], sums[r][1], sums[r][2], sums[r][3],
               scores + std::int64_t{r} * kKeyTile + key);
  }
}

// Scores of kRows rows against keys [begin, end) of the tile, rounded outwards to fours. Takes
// a step of `ahead` for each vector of four keys.
template <class ElementsT, int kRows, class RowsT>
HWY_NOINLINE void score_direct(const float* q, std::int64_t q_stride, const RowsT& k,
                               std::int64_t begin, std::int64_t end, std::int64_t dim,
                               float* scores, Ahead& ahead) {
  const FloatTag d;
  for (std::int64_t key = begin & ~std::int64_t{3}; key < end; key += 4) {
    dot_four_keys<ElementsT, kRows>(d, q, q_stride, k, key, dim, scores, ahead);
  }
}

// What becomes of the weighted sums of a tile.
enum class Sums {
  Merge,  // to = to * factors + sums
  Extend  // to continues: sums start from it and go back to it
};

// kRows rows of weights times keys [begin, end), kVectors vectors of dims from `at` on; `tail` > 0:
// one vector of so few dims.
template <class ElementsT, Sums kSums, int kRows, int kVectors, class RowsT>
HWY_INLINE void weigh_dims(FloatTag d, const float* HWY_RESTRICT weights, const RowsT& v,
                           std::int64_t begin, std::int64_t end, std::int64_t at, std::int64_t tail,
                           const float* factors, float* HWY_RESTRICT to, std::int64_t to_stride,
                           Ahead& ahead) {
  VecGrid<kRows, kVectors> sums;
  OCTAVO_UNROLL
  for (int r = 0; r < kRows; ++r) {
    OCTAVO_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      sums[r][c] =
          kSums == Sums::Extend ? hn::Load(d, to + r * to_stride + at + c * kLanes) : hn::Zero(d);
    }
  }
  for (std::int64_t key = begin; key < end; ++key) {
    ahead.step();
    const typename ElementsT::T* row = v(key) + at;
    VecRow<kVectors> values;
    if (kVectors == 1 && tail > 0) {
      values[0] = load_tail<ElementsT>(d, row, tail);
    } else {
      load_row_of<ElementsT, kVectors>(d, row, values);
    }
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const FloatVec weight = hn::Set(d, weights[std::int64_t{r} * kKeyTile + key]);
      OCTAVO_UNROLL
      for (int c = 0; c < kVectors; ++c) sums[r][c] = hn::MulAdd(weight, values[c], sums[r][c]);
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < kRows; ++r) {
    OCTAVO_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      float* place = to + r * to_stride + at + c * kLanes;
      if (kSums == Sums::Merge) {
        sums[r][c] = hn::MulAdd(hn::Load(d, place), hn::Set(d, factors[r]), sums[r][c]);
      }
      hn::Store(sums[r][c], d, place);
    }
  }
}

// All dims. Takes a step of `ahead` for each key and pass over the keys.
template <class ElementsT, Sums kSums, int kRows, int kVectors, class RowsT>
HWY_NOINLINE void weigh(const float* weights, const RowsT& v, std::int64_t begin, std::int64_t end,
                        std::int64_t dim, const float* factors, float* to, std::int64_t to_stride,
                        Ahead& ahead) {
  const FloatTag d;
  std::int64_t at = 0;
  for (; at + kVectors * kLanes <= dim; at += kVectors * kLanes) {
    weigh_dims<ElementsT, kSums, kRows, kVectors>(d, weights, v, begin, end, at, 0, factors, to,
                                                  to_stride, ahead);
  }
  for (; at < dim; at += kLanes) {
    const std::int64_t tail = dim - at < kLanes ? dim - at : 0;
    weigh_dims<ElementsT, kSums, kRows, 1>(d, weights, v, begin, end, at, tail, factors, to,
                                           to_stride, ahead);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
