// SPDX-License-Identifier: Apache-2.0
// Scores of a BF16 cache by the processor's own BF16 products (AVX512-BF16: two multiply-adds a
// lane, sums in F32), where queries are BF16 too: half the instructions and no widening. Included
// for each of Highway's targets; OCTAVO_HAS_PRODUCTS tells which has them at all.

#if defined(OCTAVO_KERNELS_CPU_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTAVO_KERNELS_CPU_PRODUCTS_INL_H_
#undef OCTAVO_KERNELS_CPU_PRODUCTS_INL_H_
#else
#define OCTAVO_KERNELS_CPU_PRODUCTS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "kernels/cpu/tile-inl.h"

#undef OCTAVO_HAS_PRODUCTS
#define OCTAVO_HAS_PRODUCTS (HWY_TARGET == HWY_AVX3)

#if OCTAVO_HAS_PRODUCTS && !defined(OCTAVO_BF16_PRODUCTS)
// Highway 1.0.3 has no target with these instructions; a function may have more of them than its
// neighbours.
#define OCTAVO_BF16_PRODUCTS __attribute__((target(HWY_TARGET_STR ",avx512bf16")))
#endif

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline bool has_products() {
#if OCTAVO_HAS_PRODUCTS
  static const bool has = __builtin_cpu_supports("avx512bf16") != 0;
  return has;
#else
  return false;
#endif
}

#if OCTAVO_HAS_PRODUCTS

// Elements of a register.
constexpr std::int64_t kProductStep = 2 * kLanes;

// As score_direct, with rows of q in BF16, `q_stride` elements apart and zero-padded to whole
// registers.
template <int kRows, class RowsT>
OCTAVO_BF16_PRODUCTS HWY_NOINLINE void score_products(const std::uint16_t* HWY_RESTRICT q,
                                                      std::int64_t q_stride, const RowsT& k,
                                                      std::int64_t begin, std::int64_t end,
                                                      std::int64_t dim, float* HWY_RESTRICT scores,
                                                      Ahead& ahead) {
  const FloatTag d;
  const auto left = static_cast<std::uint32_t>(dim % kProductStep);
  const __mmask32 tail = (std::uint32_t{1} << left) - 1U;
  for (std::int64_t key = begin & ~std::int64_t{3}; key < end; key += 4) {
    const std::uint16_t* rows[4] = {k(key), k(key + 1), k(key + 2), k(key + 3)};
    __m512 sums[kRows][4];
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      OCTAVO_UNROLL
      for (int j = 0; j < 4; ++j) sums[r][j] = _mm512_setzero_ps();
    }
    const auto add = [&](std::int64_t at, auto load) OCTAVO_BF16_PRODUCTS {
      ahead.step();
      __m512i queries[kRows];
      OCTAVO_UNROLL
      for (int r = 0; r < kRows; ++r) queries[r] = _mm512_loadu_si512(q + r * q_stride + at);
      OCTAVO_UNROLL
      for (int j = 0; j < 4; ++j) {
        const __m512i keys = load(rows[j] + at);
        OCTAVO_UNROLL
        for (int r = 0; r < kRows; ++r) {
          sums[r][j] = _mm512_dpbf16_ps(sums[r][j], reinterpret_cast<__m512bh>(queries[r]),
                                        reinterpret_cast<__m512bh>(keys));
        }
      }
    };
    std::int64_t at = 0;
    for (; at + kProductStep <= dim; at += kProductStep) {
      add(at,
          [](const std::uint16_t* from) OCTAVO_BF16_PRODUCTS { return _mm512_loadu_si512(from); });
    }
    if (left != 0) {
      add(at, [tail](const std::uint16_t* from)
                  OCTAVO_BF16_PRODUCTS { return _mm512_maskz_loadu_epi16(tail, from); });
    }
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      store_sums(d, FloatVec{sums[r][0]}, FloatVec{sums[r][1]}, FloatVec{sums[r][2]},
                 FloatVec{sums[r][3]}, scores + r * kKeyTile + key);
    }
  }
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
