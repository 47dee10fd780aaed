// SPDX-License-Identifier: Apache-2.0
// The model's own kernels on a GPU; everything else is cuBLASLt's or Octavo's. All enqueue on the
// default stream and return a cudaError_t.
#pragma once

#include <cstdint>

#include "examples/generate/matrix.h"

namespace generate::gpu {

/// out[i] = row rows[i] of a matrix [.., width] of weights, as floats.
int take_rows(const void* matrix, WeightType type, const std::int32_t* rows, std::int64_t count,
              std::int64_t width, float* out);

/// out[i] = row rows[i] of x (null: row i), over its root mean square, times gain.
int rms_norm(const float* x, const std::int32_t* rows, std::int64_t count, std::int64_t width,
             const float* gain, float epsilon, void* out, WeightType type);

/// out[i, j] = silu(gate_up[i, j]) * gate_up[i, width + j].
int swiglu(const float* gate_up, std::int64_t count, std::int64_t width, void* out,
           WeightType type);

/// out[i] = x[i], rounded.
int round_to(const float* x, std::int64_t count, void* out, WeightType type);

}  // namespace generate::gpu
