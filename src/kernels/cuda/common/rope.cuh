// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding: angles of a position, and the turn of a pair. Append (K) and the
// backends that gather q share it, so that they turn alike.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/params.h"

namespace octavo::kernels::cuda {

inline constexpr int kMaxRotaryPairs = 288;  // half of the widest head, 576

/// base^(-2i / rotary_dim) for each pair, computed on the host. Computed angles need them; tables
/// and no RoPE don't.
inline void fill_frequencies(const RopeParams& rope, double* frequencies) {
  if (rope.cos != nullptr) return;
  for (int i = 0; i < rope.rotary_dim / 2; ++i) {
    frequencies[i] = std::pow(rope.base, -2.0 * i / static_cast<double>(rope.rotary_dim));
  }
}

struct Turn {
  float cos;
  float sin;
};

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
  double sine;
  double cosine;
  sincos(static_cast<double>(position) * frequencies[pair], &sine, &cosine);
  return {static_cast<float>(cosine), static_cast<float>(sine)};
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
