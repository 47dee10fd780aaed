// SPDX-License-Identifier: Apache-2.0
// The loops of the model that no BLAS has, by Highway for whatever SIMD this machine offers. Each
// works on one range; matrix.h and model.h spread ranges over threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace generate::kernels {

/// The most input rows that `few_rows` takes at once.
inline constexpr std::size_t kMaxFewRows = 8;

/// Weights of one matrix, row-major and dense: floats, or bf16 bit patterns.
struct Weights {
  const float* f32 = nullptr;
  const std::uint16_t* bf16 = nullptr;
  std::size_t columns = 0;
};

/// y[i * y_stride + r] = dot(row r of the weights, x + i * x_stride) for r in [begin, end) and
/// num_x <= kMaxFewRows inputs. Reads each weight once. A result does not depend on num_x.
void few_rows(const Weights& weights, std::size_t begin, std::size_t end, const float* x,
              std::size_t x_stride, std::size_t num_x, float* y, std::size_t y_stride);

/// out[i] = bf16[i], widened.
void widen(const std::uint16_t* bf16, std::size_t count, float* out);

/// out[i] = x[i] / sqrt(mean of x squared + epsilon) * gain[i].
void rms_norm(const float* x, const float* gain, std::size_t count, float epsilon, float* out);

/// gate[i] = silu(gate[i]) * up[i].
void swiglu(float* gate, const float* up, std::size_t count);

/// Reads memory at full speed, in whole vectors. The result only keeps the reads alive.
std::uint64_t read(const unsigned char* bytes, std::size_t count);

}  // namespace generate::kernels
