// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding: angles of a position, and the turn of a pair. Append (K) and the
// backends that gather q share it, so that they turn alike.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/frequencies.h"
#include "kernels/params.h"

namespace octavo::kernels::cuda {

inline constexpr int kMaxRotaryPairs = 288;  // half of the widest head, 576

struct Turn {
  float cos;
  float sin;
};

/// Taylor's series on |x| <= pi/4: the first term left out is below 2e-9.
__device__ inline float sin_of_small(float x) {
  const float square = x * x;
  float series = fmaf(square, 2.7557319e-6F, -1.9841270e-4F);
  series = fmaf(square, series, 8.3333333e-3F);
  series = fmaf(square, series, -1.6666667e-1F);
  return fmaf(square * x, series, x);
}
__device__ inline float cos_of_small(float x) {
  const float square = x * x;
  float series = fmaf(square, -2.7557319e-7F, 2.4801587e-5F);
  series = fmaf(square, series, -1.3888889e-3F);
  series = fmaf(square, series, 4.1666667e-2F);
  series = fmaf(square, series, -0.5F);
  return fmaf(square, series, 1.0F);
}

/// Turn of pair `pair` at `position`. A position outside the caller's tables reads their nearest
/// row: where positions are in device memory nobody has checked them.
__device__ inline Turn turn_at(const RopeParams& rope, const double* frequencies,
                               std::int64_t position, int pair) {
  if (rope.cos != nullptr) {
    const std::int64_t last = rope.num_table_positions - 1;
    const std::int64_t row = position < 0 ? 0 : position > last ? last : position;
    const std::int64_t at = row * (rope.rotary_dim / 2) + pair;
    return {rope.cos[at], rope.sin[at]};
  }
  // The angle is float64 and brought to within pi/4 in it; sine and cosine of what is left are
  // float32.
  constexpr double kTwoOverPi = 0.63661977236758134308;
  constexpr double kHalfPiHigh = 1.57079632679489655800e+00;
  constexpr double kHalfPiLow = 6.12323399573676603587e-17;
  const double angle = static_cast<double>(position) * frequencies[pair];
  const double quarters = rint(angle * kTwoOverPi);
  const auto rest =
      static_cast<float>(fma(-quarters, kHalfPiLow, fma(-quarters, kHalfPiHigh, angle)));
  const auto quadrant = static_cast<unsigned>(static_cast<long long>(quarters)) & 3U;
  const float sine = sin_of_small(rest);
  const float cosine = cos_of_small(rest);
  const bool swaps = (quadrant & 1U) != 0;
  const float turned_sine = swaps ? cosine : sine;
  const float turned_cosine = swaps ? sine : cosine;
  return {((quadrant + 1U) & 2U) != 0 ? -turned_cosine : turned_cosine,
          (quadrant & 2U) != 0 ? -turned_sine : turned_sine};
}

/// The pair that element d belongs to, and its partner. Roundings are written out, so that every
/// path of every kernel gives the same bits.
__device__ inline int pair_of(const RopeParams& rope, int d) {
  const int pairs = rope.rotary_dim / 2;
  return rope.style == RopeStyle::Half ? (d < pairs ? d : d - pairs) : d / 2;
}
__device__ inline bool is_first(const RopeParams& rope, int d) {
  return rope.style == RopeStyle::Half ? d < rope.rotary_dim / 2 : d % 2 == 0;
}
__device__ inline int partner_of(const RopeParams& rope, int d) {
  const int apart = rope.style == RopeStyle::Half ? rope.rotary_dim / 2 : 1;
  return is_first(rope, d) ? d + apart : d - apart;
}
__device__ inline float turned(Turn turn, bool first, float own, float partner) {
  return first ? fmaf(-partner, turn.sin, __fmul_rn(own, turn.cos))
               : fmaf(partner, turn.sin, __fmul_rn(own, turn.cos));
}

}  // namespace octavo::kernels::cuda
