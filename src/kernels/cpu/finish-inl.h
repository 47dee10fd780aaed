// SPDX-License-Identifier: Apache-2.0
// The end of rows of the tiled attention, for each of Highway's targets: what output.h's finish_row
// says, a vector at a time, and the combination of splits. Needs tile-inl.h's vectors and
// math-inl.h.

#if defined(OCTAVO_KERNELS_CPU_FINISH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTAVO_KERNELS_CPU_FINISH_INL_H_
#undef OCTAVO_KERNELS_CPU_FINISH_INL_H_
#else
#define OCTAVO_KERNELS_CPU_FINISH_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/convert.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/output.h"
#include "kernels/cpu/tile-inl.h"
#include "kernels/cpu/unit.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// How float vectors become elements of the output. Round as base/convert.h does.
struct F32Output {
  using T = float;
  static HWY_INLINE void store(FloatTag d, FloatVec v, T* to) { hn::StoreU(v, d, to); }
};
struct F16Output {
  using T = std::uint16_t;
  static HWY_INLINE void store([[maybe_unused]] FloatTag d, FloatVec v, T* to) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_NEON
    const hn::Rebind<hwy::float16_t, FloatTag> dh;
    const hn::Rebind<std::uint16_t, FloatTag> du;
    hn::StoreU(hn::BitCast(du, hn::DemoteTo(dh, v)), du, to);
#else
    // Highway 1.0.3's portable narrowing rounds towards 0.
    float values[kLanes];
    hn::StoreU(v, d, values);
    for (std::int64_t i = 0; i < kLanes; ++i) to[i] = base::float_to_f16(values[i]);
#endif
  }
};
struct Bf16Output {
  using T = std::uint16_t;
  static HWY_INLINE void store(FloatTag /*d*/, FloatVec v, T* to) {
    const hn::RebindToUnsigned<FloatTag> du;
    const hn::RebindToSigned<FloatTag> di;
    const hn::Rebind<std::uint16_t, FloatTag> du16;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1U));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFU)));
    const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000U));
    const auto wide = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
    hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, hn::ShiftRight<16>(wide))), du16, to);
  }
};

// to[0, dim) = from * factor. `from` is padded to whole vectors.
template <class OutputT>
HWY_INLINE void store_scaled(const float* HWY_RESTRICT from, float factor, std::int64_t dim,
                             typename OutputT::T* HWY_RESTRICT to) {
  const FloatTag d;
  const FloatVec scale = hn::Set(d, factor);
  const std::int64_t whole = dim / kLanes * kLanes;
  for (std::int64_t at = 0; at < whole; at += kLanes) {
    OutputT::store(d, hn::Mul(hn::Load(d, from + at), scale), to + at);
  }
  if (whole == dim) return;
  typename OutputT::T tail[kMaxLanes];
  OutputT::store(d, hn::Mul(hn::Load(d, from + whole), scale), tail);
  std::copy_n(tail, dim % kLanes, to + whole);
}

// As finish_row; `row.weighted` is padded to whole vectors.
inline void finish_wide_row(const AttendParams& params, std::int32_t b, std::int32_t i,
                            std::int32_t head, const RowState<float>& row) {
  const TokenLayout& layout = params.out_layout;
  if (layout.dim_stride != 1 || row.sum == 0.0F) return finish_row(params, b, i, head, row);
  const std::int64_t to = token_offset(layout, params.batch, b, i) + head * layout.head_stride;
  const float factor = output_factor(row, params.sinks, head);
  const std::int64_t dim = params.head_dim_v;
  switch (params.out_dtype) {
    case DType::F16:
      store_scaled<F16Output>(row.weighted, factor, dim,
                              static_cast<std::uint16_t*>(params.out) + to);
      break;
    case DType::BF16:
      store_scaled<Bf16Output>(row.weighted, factor, dim,
                               static_cast<std::uint16_t*>(params.out) + to);
      break;
    default:
      store_scaled<F32Output>(row.weighted, factor, dim, static_cast<float*>(params.out) + to);
  }
  finish_lse(params, b, i, head, row);
}

// Puts the splits of a row together, in their order.
inline void combine_row(const Unit& unit, std::int32_t i, std::int32_t head,
                        float* HWY_RESTRICT weighted) {
  const FloatTag d;
  const AttendParams& p = *unit.params;
  const Partials& partials = *unit.partials;
  const std::int64_t first_row =
      unit.first_partial_row + std::int64_t{i - unit.first_token} * unit.num_splits;
  const auto place = [&](std::int32_t j) { return (first_row + j) * p.num_q_heads + head; };
  float max = -std::numeric_limits<float>::infinity();
  for (std::int32_t j = 0; j < unit.num_splits; ++j) max = std::max(max, partials.max[place(j)]);
  const std::int64_t stride = padded(p.head_dim_v);
  std::fill_n(weighted, stride, 0.0F);
  float sum = 0.0F;
  for (std::int32_t begin = 0; begin < unit.num_splits; begin += kLanes) {
    const auto count =
        static_cast<std::int32_t>(std::min<std::int64_t>(kLanes, unit.num_splits - begin));
    HWY_ALIGN float weights[kMaxLanes] = {};
    for (std::int32_t j = 0; j < count; ++j) weights[j] = partials.max[place(begin + j)];
    hn::Store(exponential(d, hn::Sub(hn::Load(d, weights), hn::Set(d, max))), d, weights);
    for (std::int32_t j = 0; j < count; ++j) {
      const std::int64_t at = place(begin + j);
      if (partials.sum[at] == 0.0F) continue;  // saw no key
      sum += weights[j] * partials.sum[at];
      const FloatVec weight = hn::Set(d, weights[j]);
      const float* HWY_RESTRICT part = partials.weighted + at * stride;
      for (std::int64_t e = 0; e < stride; e += kLanes) {
        hn::Store(hn::MulAdd(weight, hn::Load(d, part + e), hn::Load(d, weighted + e)), d,
                  weighted + e);
      }
    }
  }
  finish_wide_row(p, unit.b, i, head, RowState<float>{weighted, max, sum});
}

// Lines of a row of sums that the thread will read, or write.
template <bool kToWrite>
void prefetch_row(const float* row, std::int64_t floats) {
  constexpr std::int64_t kLineFloats = 16;
  for (std::int64_t e = 0; e < floats; e += kLineFloats)
    __builtin_prefetch(row + e, kToWrite ? 1 : 0, 2);
}

// Other threads wrote most of it: it is on its way while the rows before are combined.
inline void fetch_partials(const Unit& unit, std::int32_t i, std::int32_t head) {
  const AttendParams& p = *unit.params;
  const std::int64_t first_row =
      unit.first_partial_row + std::int64_t{i - unit.first_token} * unit.num_splits;
  const std::int64_t stride = padded(p.head_dim_v);
  for (std::int32_t j = 0; j < unit.num_splits; ++j) {
    prefetch_row<false>(unit.partials->weighted + ((first_row + j) * p.num_q_heads + head) * stride,
                        stride);
  }
}

// All rows of a unit, whose splits are all there.
inline void combine_rows(const Unit& unit, float* weighted) {
  constexpr std::int32_t kAhead = 4;
  const std::int32_t group = unit.params->num_q_heads / unit.params->num_kv_heads;
  const std::int32_t end = unit.end_head * group;
  for (std::int32_t i = unit.first_token; i < unit.first_token + unit.num_tokens; ++i) {
    for (std::int32_t h = unit.first_head * group; h < end; ++h) {
      if (h == unit.first_head * group) {
        for (std::int32_t next = h; next < std::min(h + kAhead, end); ++next) {
          fetch_partials(unit, i, next);
        }
      }
      if (h + kAhead < end) fetch_partials(unit, i, h + kAhead);
      combine_row(unit, i, h, weighted);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
