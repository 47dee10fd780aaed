// SPDX-License-Identifier: Apache-2.0
// RoPE's frequencies, made on the host. Compiles without CUDA.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/params.h"

namespace octavo::kernels::cuda {

/// base^(-2i / rotary_dim) for each pair. Computed angles need them; tables and no RoPE don't.
inline void fill_frequencies(const RopeParams& rope, double* frequencies) {
  if (rope.cos != nullptr) return;
  for (std::int32_t i = 0; i < rope.rotary_dim / 2; ++i)
    frequencies[i] = std::pow(rope.base, -2.0 * i / static_cast<double>(rope.rotary_dim));
}

}  // namespace octavo::kernels::cuda
