// SPDX-License-Identifier: Apache-2.0
// The weights of a model of the Llama architecture, out of a GGUF file.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "examples/generate/gguf.h"
#include "examples/generate/matrix.h"

namespace generate {

struct ModelConfig {
  std::int32_t num_layers = 0;
  std::int32_t width = 0;
  std::int32_t ffn_width = 0;
  std::int32_t num_q_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t head_dim_v = 0;
  std::int32_t rotary_dim = 0;
  std::int32_t vocab_size = 0;
  std::int64_t context_length = 0;  ///< Tokens.
  double rope_base = 10000.0;
  double rope_scale = 1.0;  ///< Positions are divided by it.
  float norm_epsilon = 1e-5F;
};

/// Reads the sizes. Errors: InvalidArgument for another architecture, or a variant of it that this
/// program does not compute, by name.
ModelConfig read_config(const Gguf& file);

struct LayerWeights {
  std::vector<float> attention_norm;
  std::vector<float> ffn_norm;
  Matrix qkv;      ///< [(num_q_heads + num_kv_heads) * head_dim + num_kv_heads * head_dim_v, width]
  Matrix output;   ///< [width, num_q_heads * head_dim_v]
  Matrix gate_up;  ///< [2 * ffn_width, width]
  Matrix down;     ///< [width, ffn_width]
};

struct Weights {
  ModelConfig config;
  Matrix embedding;  ///< [vocab_size, width]
  Matrix logits;     ///< As embedding; empty when the embedding serves for both.
  std::vector<float> final_norm;
  std::vector<float> rope_factors;  ///< [rotary_dim / 2] divisors of the frequencies, or empty.
  std::vector<LayerWeights> layers;

  [[nodiscard]] const Matrix& logit_matrix() const noexcept {
    return logits.rows() > 0 ? logits : embedding;
  }
  /// Bytes of weights that one step reads.
  [[nodiscard]] std::size_t step_bytes() const noexcept;
  /// Bytes per second of reading them, the best of a few passes.
  [[nodiscard]] double measure_bandwidth(int num_threads) const;
};

/// Told how many bytes of tensors are loaded, of how many.
using LoadProgress = std::function<void(std::size_t, std::size_t)>;

/// Widens all tensors to the type asked for. Errors: InvalidArgument, naming the tensor, for one
/// that is missing, has another shape, a type that cannot be read, or is one the program does not
/// use (to go on would be to compute another model); OutOfMemory.
Weights load_weights(const Gguf& file, WeightType type, int num_threads,
                     const LoadProgress& progress);

}  // namespace generate
