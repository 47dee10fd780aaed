// SPDX-License-Identifier: Apache-2.0
// The Llama architecture over Octavo's cache.
#include "examples/generate/model.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "examples/generate/error.h"
#include "examples/generate/kernels.h"

namespace generate {
namespace {

octavo::CacheConfig cache_config(const ModelConfig& model, const CacheChoice& choice) {
  octavo::CacheConfig config;
  config.kind = choice.kind;
  config.num_layers = model.num_layers;
  config.num_kv_heads = model.num_kv_heads;
  config.head_dim = model.head_dim;
  config.head_dim_v = model.head_dim_v;
  config.dtype = choice.dtype;
  config.max_num_seqs = choice.max_num_seqs;
  config.max_seq_len = choice.max_seq_len;
  config.page_size = choice.page_size;
  config.num_pages = choice.num_pages;
  config.device = choice.device;
  return config;
}

octavo::AttentionConfig attention_config(const ModelConfig& model, const CacheChoice& choice,
                                         int num_threads) {
  octavo::AttentionConfig config;
  config.num_q_heads = model.num_q_heads;
  config.num_kv_heads = model.num_kv_heads;
  config.head_dim = model.head_dim;
  config.head_dim_v = model.head_dim_v;
  config.backend = choice.backend;
  config.num_threads = num_threads;
  return config;
}

std::size_t size(std::int32_t value) { return static_cast<std::size_t>(value); }

void grow(Buffer<float>& buffer, std::size_t count) {
  if (buffer.size() < count) buffer = Buffer<float>(count);
}

}  // namespace

std::int64_t max_kept_tokens(const CacheChoice& choice) noexcept {
  if (choice.kind != octavo::CacheKind::Paged) return choice.max_seq_len;
  return std::min(choice.max_seq_len, choice.num_pages * choice.page_size);
}

double cache_bytes(const ModelConfig& config, const CacheChoice& choice) noexcept {
  const double slots =
      choice.kind == octavo::CacheKind::Paged
          ? static_cast<double>(choice.num_pages) * choice.page_size
          : static_cast<double>(choice.max_num_seqs) * static_cast<double>(choice.max_seq_len);
  return slots * config.num_layers * config.num_kv_heads * (config.head_dim + config.head_dim_v) *
         static_cast<double>(octavo::dtype_bytes(choice.dtype));
}

Model::Model(const Weights& weights, const CacheChoice& choice, int num_threads)
    : weights_(weights),
      choice_(choice),
      cache_(cache_config(weights.config, choice)),
      attention_(attention_config(weights.config, choice, num_threads), cache_.config()),
      num_threads_(num_threads) {
  if (choice.device.type == octavo::DeviceType::Cuda) gpu_ = make_gpu_model(weights, choice.device);
  make_rope(choice.max_seq_len);
}

// GGUF stores the rows of q and k of this architecture so that partners lie side by side.
void Model::make_rope(std::int64_t max_seq_len) {
  const ModelConfig& model = weights_.config;
  rope_.style = octavo::RopeStyle::Interleaved;
  rope_.rotary_dim = model.rotary_dim;
  rope_.base = model.rope_base;
  if (weights_.rope_factors.empty() && model.rope_scale == 1.0) return;

  const std::size_t num_pairs = size(model.rotary_dim) / 2;
  const auto num_positions = static_cast<std::size_t>(max_seq_len);
  rope_cos_.resize(num_positions * num_pairs);
  rope_sin_.resize(num_positions * num_pairs);
  for (std::size_t pair = 0; pair < num_pairs; ++pair) {
    const double exponent = -2.0 * static_cast<double>(pair) / model.rotary_dim;
    double frequency = std::pow(model.rope_base, exponent) / model.rope_scale;
    if (!weights_.rope_factors.empty()) {
      frequency /= static_cast<double>(weights_.rope_factors[pair]);
    }
    for (std::size_t position = 0; position < num_positions; ++position) {
      const double angle = static_cast<double>(position) * frequency;
      rope_cos_[position * num_pairs + pair] = static_cast<float>(std::cos(angle));
      rope_sin_[position * num_pairs + pair] = static_cast<float>(std::sin(angle));
    }
  }
  rope_.cos = gpu_ != nullptr ? gpu_->keep(rope_cos_) : rope_cos_.data();
  rope_.sin = gpu_ != nullptr ? gpu_->keep(rope_sin_) : rope_sin_.data();
  rope_.num_table_positions = max_seq_len;
}

void Model::norm(const Buffer<float>& from, const std::vector<float>& gain, std::size_t rows,
                 Buffer<float>& to) const {
  const std::size_t width = size(weights_.config.width);
  // One row is done before a second thread has woken up.
#pragma omp parallel for num_threads(num_threads_) schedule(static) if (rows > 8)
  for (std::int64_t r = 0; r < static_cast<std::int64_t>(rows); ++r) {
    const std::size_t offset = static_cast<std::size_t>(r) * width;
    kernels::rms_norm(from.data() + offset, gain.data(), width, weights_.config.norm_epsilon,
                      to.data() + offset);
  }
}

void Model::add_to_stream(const Buffer<float>& update, std::size_t rows) {
  const auto count = static_cast<std::int64_t>(rows * size(weights_.config.width));
  float* const stream = stream_.data();
  const float* const values = update.data();
#pragma omp parallel for simd num_threads(num_threads_) schedule(static) if (rows > 32)
  for (std::int64_t i = 0; i < count; ++i) stream[i] += values[i];
}

void Model::attend(const octavo::StepPlan& plan, std::int32_t layer, const float* qkv,
                   float* heads_out) {
  const ModelConfig& model = weights_.config;
  const std::int64_t rows = plan.num_tokens();
  const std::int64_t q_width = std::int64_t{model.num_q_heads} * model.head_dim;
  const std::int64_t k_width = std::int64_t{model.num_kv_heads} * model.head_dim;
  const std::int64_t v_width = std::int64_t{model.num_kv_heads} * model.head_dim_v;
  // q, k and v of a token lie behind each other in its row.
  const auto part = [&](std::int64_t offset, std::int64_t heads, std::int64_t dim) {
    octavo::ConstTensorView view(qkv + offset, octavo::DType::F32, {rows, heads, dim},
                                 choice_.device);
    view.strides[0] = q_width + k_width + v_width;
    return view;
  };
  octavo::LayerInputs inputs;
  inputs.q = part(0, model.num_q_heads, model.head_dim);
  inputs.k = part(q_width, model.num_kv_heads, model.head_dim);
  inputs.v = part(q_width + k_width, model.num_kv_heads, model.head_dim_v);
  inputs.rope = &rope_;
  const octavo::TensorView out(heads_out, octavo::DType::F32,
                               {rows, model.num_q_heads, model.head_dim_v}, choice_.device);
  const auto start = std::chrono::steady_clock::now();
  attention_.forward(plan, cache_, layer, inputs, out);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  if (gpu_ == nullptr) attention_seconds_ += elapsed.count();
}

void Model::run_layer(const octavo::StepPlan& plan, std::int32_t layer) {
  const LayerWeights& weights = weights_.layers[size(layer)];
  const std::size_t rows = size(plan.num_tokens());
  const std::size_t ffn_width = size(weights_.config.ffn_width);

  norm(stream_, weights.attention_norm, rows, normed_);
  weights.qkv.multiply(normed_.data(), rows, qkv_.data(), num_threads_);
  attend(plan, layer, qkv_.data(), heads_.data());
  weights.output.multiply(heads_.data(), rows, update_.data(), num_threads_);
  add_to_stream(update_, rows);

  norm(stream_, weights.ffn_norm, rows, normed_);
  weights.gate_up.multiply(normed_.data(), rows, gate_up_.data(), num_threads_);
#pragma omp parallel for num_threads(num_threads_) schedule(static) if (rows > 1)
  for (std::int64_t r = 0; r < static_cast<std::int64_t>(rows); ++r) {
    const auto row = static_cast<std::size_t>(r);
    float* const gate = gate_up_.data() + row * 2 * ffn_width;
    kernels::swiglu(gate, gate + ffn_width, ffn_width);
    std::copy_n(gate, ffn_width, gated_.data() + row * ffn_width);
  }
  weights.down.multiply(gated_.data(), rows, update_.data(), num_threads_);
  add_to_stream(update_, rows);
}

std::span<const float> Model::step(const octavo::StepPlan& plan, std::span<const TokenId> tokens,
                                   std::span<const std::size_t> logit_tokens) {
  attention_seconds_ = 0.0;
  backend_ = attention_.explain(plan, octavo::TensorFormat::Thd).chosen;
  cache_.begin(plan);
  if (gpu_ != nullptr) {
    return gpu_->step(tokens, logit_tokens,
                      [&](std::int32_t layer, const float* qkv, float* heads) {
                        attend(plan, layer, qkv, heads);
                      });
  }
  const ModelConfig& model = weights_.config;
  const std::size_t rows = tokens.size();
  const std::size_t width = size(model.width);
  const std::size_t head_rows = size(model.num_q_heads) * size(model.head_dim_v);
  grow(stream_, rows * width);
  grow(normed_, rows * width);
  grow(update_, rows * width);
  grow(qkv_, rows * weights_.layers.front().qkv.rows());
  grow(heads_, rows * head_rows);
  grow(gate_up_, rows * 2 * size(model.ffn_width));
  grow(gated_, rows * size(model.ffn_width));
  grow(logits_, logit_tokens.size() * size(model.vocab_size));

  for (std::size_t i = 0; i < rows; ++i) {
    weights_.embedding.get_row(size(tokens[i]), stream_.span().subspan(i * width, width));
  }
  for (std::int32_t layer = 0; layer < model.num_layers; ++layer) run_layer(plan, layer);

  // Only these rows are looked at any further; they are in ascending order.
  for (std::size_t i = 0; i < logit_tokens.size(); ++i) {
    std::copy_n(stream_.data() + logit_tokens[i] * width, width, stream_.data() + i * width);
  }
  norm(stream_, weights_.final_norm, logit_tokens.size(), normed_);
  weights_.logit_matrix().multiply(normed_.data(), logit_tokens.size(), logits_.data(),
                                   num_threads_);
  return {logits_.data(), logit_tokens.size() * size(model.vocab_size)};
}

}  // namespace generate
