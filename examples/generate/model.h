// SPDX-License-Identifier: Apache-2.0
// The model: what happens to the new tokens of a step between the plan and the logits. Attention is
// Octavo's; the rest is here. Who takes part in a step is scheduler.h's.
#pragma once

#include <octavo/octavo.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "examples/generate/gpu.h"
#include "examples/generate/matrix.h"
#include "examples/generate/tokenizer.h"
#include "examples/generate/weights.h"

namespace generate {

/// How the keys and values are kept, and who attends to them.
struct CacheChoice {
  octavo::CacheKind kind = octavo::CacheKind::Paged;
  octavo::DType dtype = octavo::DType::F32;
  std::int32_t max_num_seqs = 1;
  std::int64_t max_seq_len = 0;  ///< Tokens.
  std::int32_t page_size = 16;
  std::int64_t num_pages = 0;
  octavo::Backend backend = octavo::Backend::Auto;
  octavo::Device device = {};  ///< Where the whole model runs.
};

class Model {
 public:
  /// `weights` must outlive the model. Errors: those of octavo::KvCache and octavo::Attention.
  Model(const Weights& weights, const CacheChoice& choice, int num_threads);

  [[nodiscard]] octavo::KvCache& cache() noexcept { return cache_; }
  [[nodiscard]] const CacheChoice& choice() const noexcept { return choice_; }
  [[nodiscard]] const ModelConfig& config() const noexcept { return weights_.config; }

  /// Runs a step that `cache()` planned, from begin to logits.
  ///
  /// Shapes: tokens [plan.num_tokens()], packed in batch order; logit_tokens: which of them the
  /// logits are wanted of. Returns logits [logit_tokens.size(), vocab_size], valid until the next
  /// step.
  std::span<const float> step(const octavo::StepPlan& plan, std::span<const TokenId> tokens,
                              std::span<const std::size_t> logit_tokens);

  /// The backend that ran the newest step.
  [[nodiscard]] std::string backend_name() const { return octavo::to_string(backend_); }
  /// Time spent in octavo::Attention during the newest step; 0 on a GPU, which works on by itself.
  [[nodiscard]] double attention_seconds() const noexcept { return attention_seconds_; }

 private:
  void attend(const octavo::StepPlan& plan, std::int32_t layer, const float* qkv, float* heads);
  void run_layer(const octavo::StepPlan& plan, std::int32_t layer);
  void norm(const Buffer<float>& from, const std::vector<float>& gain, std::size_t rows,
            Buffer<float>& to) const;
  void add_to_stream(const Buffer<float>& update, std::size_t rows);
  void make_rope(std::int64_t max_seq_len);

  const Weights& weights_;
  CacheChoice choice_;
  octavo::KvCache cache_;
  octavo::Attention attention_;
  octavo::Rope rope_;
  std::vector<float> rope_cos_, rope_sin_;  // only where the angles are not the plain ones
  std::unique_ptr<GpuModel> gpu_;           // null on the CPU
  int num_threads_;
  octavo::Backend backend_ = octavo::Backend::Auto;
  double attention_seconds_ = 0.0;

  // Activations, one row for each token of the step.
  Buffer<float> stream_;  // what the layers add to
  Buffer<float> normed_;
  Buffer<float> qkv_;
  Buffer<float> heads_;
  Buffer<float> update_;
  Buffer<float> gate_up_;  // [rows, 2 * ffn_width]
  Buffer<float> gated_;
  Buffer<float> logits_;
};

/// Tokens that one sequence may keep in such a cache when it has it for itself.
std::int64_t max_kept_tokens(const CacheChoice& choice) noexcept;

/// Bytes of the cache that a choice asks for, as a double: the numbers are the user's and may be
/// absurd.
double cache_bytes(const ModelConfig& config, const CacheChoice& choice) noexcept;

}  // namespace generate
