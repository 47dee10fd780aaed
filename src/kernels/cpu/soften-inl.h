// SPDX-License-Identifier: Apache-2.0
// The softmax step of one row over one key tile, for each of Highway's targets: logits, masks,
// weights, the running maximum and sum.

#if defined(OCTAVO_KERNELS_CPU_SOFTEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTAVO_KERNELS_CPU_SOFTEN_INL_H_
#undef OCTAVO_KERNELS_CPU_SOFTEN_INL_H_
#else
#define OCTAVO_KERNELS_CPU_SOFTEN_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cpu/key_tile.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

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

}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
