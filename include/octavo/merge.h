// SPDX-License-Identifier: Apache-2.0
// Merging of partial results: attention over parts of the keys, combined into attention over all of
// them.
#pragma once

#include <octavo/export.h>
#include <octavo/tensor.h>
#include <octavo/types.h>

#include <cstdint>
#include <span>

namespace octavo {

/// Attention over a part of the keys, computed without sinks.
/// Shapes: out [num_tokens, num_heads, head_dim_v], any of F32, F16, BF16; lse F32 [num_tokens,
/// num_heads], natural log.
struct Partial {
  ConstTensorView out;
  ConstTensorView lse;
};

/// out = sum of exp(lse_i - lse) * out_i with lse = log(sum of exp(lse_i)), in float32, in the
/// order given.
///
/// (0, -inf) is the neutral element: partials whose lse is -inf are not read, and a row with no
/// others gives 0 and -inf. `sinks` [num_heads] are applied once, last, and don't show in lse.
/// Shapes: as Partial; `lse` may be null. Device: CPU. Errors: InvalidArgument for shapes, dtypes,
/// devices that don't fit.
OCTAVO_EXPORT void merge(std::span<const Partial> partials, const TensorView& out,
                         const TensorView* lse = nullptr, const float* sinks = nullptr,
                         Stream stream = {});

}  // namespace octavo
