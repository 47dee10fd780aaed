// SPDX-License-Identifier: Apache-2.0
#include "examples/generate/gpu.h"

#include <cuda_runtime_api.h>

#include <deque>

#include "examples/generate/cuda/kernels.h"
#include "examples/generate/cuda/product.h"

namespace generate {
namespace {

using gpu::check;
using gpu::GpuMatrix;
using gpu::Memory;

GpuMatrix upload(const Matrix& matrix) {
  GpuMatrix copy;
  copy.rows = static_cast<std::int64_t>(matrix.rows());
  copy.columns = static_cast<std::int64_t>(matrix.columns());
  copy.memory.upload(matrix.data(), matrix.bytes());
  return copy;
}

Memory upload(const std::vector<float>& values) {
  Memory copy;
  copy.upload(values.data(), values.size() * sizeof(float));
  return copy;
}

struct Layer {
  Memory attention_norm, ffn_norm;
  GpuMatrix qkv, output, gate_up, down;
};

class CudaModel final : public GpuModel {
 public:
  explicit CudaModel(const Weights& weights)
      : config_(weights.config),
        type_(weights.embedding.type()),
        embedding_(upload(weights.embedding)),
        final_norm_(upload(weights.final_norm)) {
    if (weights.logits.rows() > 0) logit_matrix_ = upload(weights.logits);
    for (const LayerWeights& layer : weights.layers) {
      layers_.push_back({upload(layer.attention_norm), upload(layer.ffn_norm), upload(layer.qkv),
                         upload(layer.output), upload(layer.gate_up), upload(layer.down)});
    }
  }

  std::span<const float> step(std::span<const TokenId> tokens,
                              std::span<const std::size_t> logit_tokens,
                              const Attend& attend) override {
    const auto rows = static_cast<std::int64_t>(tokens.size());
    const auto num_logits = static_cast<std::int64_t>(logit_tokens.size());
    fit(rows, num_logits);
    const std::vector<std::int32_t> ids(tokens.begin(), tokens.end());
    rows_.upload(ids.data(), ids.size() * sizeof(std::int32_t));
    check(gpu::take_rows(embedding_.memory.get(), type_, rows_.ints(), rows, config_.width,
                         stream_.floats()),
          "take_rows");
    for (std::size_t i = 0; i < layers_.size(); ++i)
      run_layer(layers_[i], static_cast<std::int32_t>(i), rows, attend);

    const std::vector<std::int32_t> wanted(logit_tokens.begin(), logit_tokens.end());
    rows_.upload(wanted.data(), wanted.size() * sizeof(std::int32_t));
    norm(rows_.ints(), num_logits, final_norm_);
    products_.multiply(logit_matrix_.rows > 0 ? logit_matrix_ : embedding_, type_, normed_.get(),
                       num_logits, logits_.floats(), false);
    host_logits_.resize(static_cast<std::size_t>(num_logits * config_.vocab_size));
    check(cudaMemcpy(host_logits_.data(), logits_.get(), host_logits_.size() * sizeof(float),
                     cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    return host_logits_;
  }

  const float* keep(const std::vector<float>& values) override {
    kept_.push_back(upload(values));
    return kept_.back().floats();
  }

 private:
  void run_layer(const Layer& layer, std::int32_t idx, std::int64_t rows, const Attend& attend) {
    norm(nullptr, rows, layer.attention_norm);
    products_.multiply(layer.qkv, type_, normed_.get(), rows, qkv_.floats(), false);
    attend(idx, qkv_.floats(), heads_.floats());
    const void* heads = heads_.get();
    if (type_ != WeightType::F32) {
      check(gpu::round_to(heads_.floats(), rows * layer.output.columns, rounded_.get(), type_),
            "round_to");
      heads = rounded_.get();
    }
    products_.multiply(layer.output, type_, heads, rows, stream_.floats(), true);

    norm(nullptr, rows, layer.ffn_norm);
    products_.multiply(layer.gate_up, type_, normed_.get(), rows, gate_up_.floats(), false);
    check(gpu::swiglu(gate_up_.floats(), rows, config_.ffn_width, gated_.get(), type_), "swiglu");
    products_.multiply(layer.down, type_, gated_.get(), rows, stream_.floats(), true);
  }

  void norm(const std::int32_t* rows, std::int64_t count, const Memory& gain) {
    check(gpu::rms_norm(stream_.floats(), rows, count, config_.width, gain.floats(),
                        config_.norm_epsilon, normed_.get(), type_),
          "rms_norm");
  }

  // In floats each, enough for either type of weights.
  void fit(std::int64_t rows, std::int64_t num_logits) {
    const auto grow = [](Memory& memory, std::int64_t count, std::int64_t width) {
      memory.fit(static_cast<std::size_t>(count * width) * sizeof(float));
    };
    grow(stream_, rows, config_.width);
    grow(normed_, rows, config_.width);
    grow(qkv_, rows, layers_.front().qkv.rows);
    grow(heads_, rows, layers_.front().output.columns);
    grow(rounded_, rows, layers_.front().output.columns);
    grow(gate_up_, rows, 2 * std::int64_t{config_.ffn_width});
    grow(gated_, rows, config_.ffn_width);
    grow(logits_, num_logits, config_.vocab_size);
  }

  ModelConfig config_;
  WeightType type_;
  GpuMatrix embedding_;
  GpuMatrix logit_matrix_;  // no rows: the embedding serves for both
  Memory final_norm_;
  std::vector<Layer> layers_;
  std::deque<Memory> kept_;
  gpu::Products products_;

  // Activations, one row for each token of the step.
  Memory rows_, stream_, normed_, qkv_, heads_, rounded_, gate_up_, gated_, logits_;
  std::vector<float> host_logits_;
};

}  // namespace

std::unique_ptr<GpuModel> make_gpu_model(const Weights& weights, octavo::Device device) {
  check(cudaSetDevice(device.index), "cudaSetDevice");
  return std::make_unique<CudaModel>(weights);
}

}  // namespace generate
