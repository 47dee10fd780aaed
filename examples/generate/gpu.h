// SPDX-License-Identifier: Apache-2.0
// What the model computes beside attention, on a GPU: weights and activations in its memory, matrix
// products by cuBLASLt. In cuda/, or, for builds without the CUDA part, in no_cuda/, where making
// one refuses.
#pragma once

#include <octavo/octavo.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "examples/generate/tokenizer.h"
#include "examples/generate/weights.h"

namespace generate {

class GpuModel {
 public:
  /// Attention of a layer: from rows of q, k and v behind each other to rows of heads, on the
  /// device's default stream.
  using Attend = std::function<void(std::int32_t layer, const float* qkv, float* heads)>;

  virtual ~GpuModel() = default;

  /// As Model::step, between begin and logits. The logits are the host's.
  virtual std::span<const float> step(std::span<const TokenId> tokens,
                                      std::span<const std::size_t> logit_tokens,
                                      const Attend& attend) = 0;

  /// A copy in the GPU's memory that lives as long as this.
  virtual const float* keep(const std::vector<float>& values) = 0;
};

/// Copies the weights, which must live on for their sizes. Errors: octavo::Error NotCompiled,
/// DeviceFailure, OutOfMemory.
std::unique_ptr<GpuModel> make_gpu_model(const Weights& weights, octavo::Device device);

}  // namespace generate
