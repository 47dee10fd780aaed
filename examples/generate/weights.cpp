// SPDX-License-Identifier: Apache-2.0
// From GGUF tensors to weight matrices.
#include "examples/generate/weights.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "examples/generate/error.h"
#include "examples/generate/memory.h"

namespace generate {
namespace {

constexpr std::int64_t kMaxExtent = 1 << 24;

std::optional<std::int64_t> optional_extent(const Gguf& file, const char* key, std::int64_t most) {
  const auto value = file.integer(key);
  if (value && (*value < 1 || *value > most)) {
    fail("{}: {}: wanted 1 to {}, got {}", file.name(), key, most, *value);
  }
  return value;
}

std::int64_t extent(const Gguf& file, const char* key, std::int64_t most = kMaxExtent) {
  const auto value = optional_extent(file, key, most);
  if (!value) fail("{}: {}: wanted 1 to {}, got none", file.name(), key, most);
  return *value;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text + "]";
}

double positive(const Gguf& file, const char* key, double otherwise) {
  const double value = file.number(key).value_or(otherwise);
  // Written so that NaN is refused.
  if (!(value > 0.0 && value < 1e30)) {
    fail("{}: {}: wanted a positive number, got {}", file.name(), key, value);
  }
  return value;
}

void read_rope(const Gguf& file, ModelConfig& config) {
  config.rotary_dim = static_cast<std::int32_t>(
      optional_extent(file, "llama.rope.dimension_count", kMaxExtent).value_or(config.head_dim));
  if (config.rotary_dim % 2 != 0 || config.rotary_dim > config.head_dim) {
    fail("{}: llama.rope.dimension_count: wanted an even number up to {}, got {}", file.name(),
         config.head_dim, config.rotary_dim);
  }
  config.rope_base = positive(file, "llama.rope.freq_base", 10000.0);
  const std::string_view scaling = file.text("llama.rope.scaling.type").value_or("none");
  if (scaling == "linear") {
    config.rope_scale = positive(file, "llama.rope.scaling.factor", 1.0);
  } else if (scaling != "none") {
    fail("{}: llama.rope.scaling.type: wanted none or linear, got {}", file.name(),
         printable(scaling));
  }
}

// Takes tensors out of the file by name, remembers which, and counts their bytes.
class Loader {
 public:
  Loader(const Gguf& file, WeightType type, int num_threads, const LoadProgress& progress)
      : file_(file), progress_(progress), type_(type), num_threads_(num_threads) {
    for (const GgufTensor& tensor : file.tensors()) total_ += tensor.data.size();
  }

  [[nodiscard]] bool has(std::string_view name) const { return file_.find_tensor(name) != nullptr; }

  std::vector<float> vector(const std::string& name, std::size_t size) {
    const GgufTensor& tensor = take(name, {static_cast<std::int64_t>(size)});
    std::vector<float> values(size);
    dequantize(tensor.type, tensor.data.data(), values);
    advance(tensor);
    return values;
  }

  // Several tensors under each other in one matrix: {name, rows} each.
  Matrix matrix(const std::vector<std::pair<std::string, std::size_t>>& parts,
                std::size_t columns) {
    std::size_t rows = 0;
    for (const auto& part : parts) rows += part.second;
    // Looked up before memory is asked for: the sizes are only claims so far.
    std::vector<const GgufTensor*> tensors;
    for (const auto& [name, part_rows] : parts) {
      tensors.push_back(
          &take(name, {static_cast<std::int64_t>(columns), static_cast<std::int64_t>(part_rows)}));
    }
    Matrix matrix(rows, columns, type_);
    std::size_t first_row = 0;
    for (const GgufTensor* tensor : tensors) {
      fill(*tensor, matrix, first_row, columns);
      first_row += static_cast<std::size_t>(tensor->shape[1]);
      advance(*tensor);
    }
    return matrix;
  }

  void demand_all_taken() const {
    for (const GgufTensor& tensor : file_.tensors()) {
      if (!taken_.contains(tensor.name)) {
        fail("{}: tensor {}: wanted none of that name, got a model of another make", file_.name(),
             printable(tensor.name));
      }
    }
  }

 private:
  const GgufTensor& take(const std::string& name, const std::vector<std::int64_t>& shape) {
    const GgufTensor* const tensor = file_.find_tensor(name);
    if (tensor == nullptr)
      fail("{}: tensor {}: wanted {}, got none", file_.name(), name, shape_text(shape));
    if (tensor->shape != shape) {
      fail("{}: tensor {}: wanted {}, got {}", file_.name(), name, shape_text(shape),
           shape_text(tensor->shape));
    }
    if (block_size(tensor->type).elements == 0) {
      fail("{}: tensor {}: wanted F32, F16, BF16, Q8_0, Q4_0 or Q4_1, got {}", file_.name(), name,
           type_name(tensor->type));
    }
    taken_.insert(tensor->name);
    return *tensor;
  }

  void fill(const GgufTensor& tensor, Matrix& matrix, std::size_t first_row,
            std::size_t columns) const {
    const BlockSize block = block_size(tensor.type);
    const std::size_t row_bytes = columns / block.elements * block.bytes;
    const std::int64_t rows = tensor.shape[1];
    std::vector<float> scratch(columns * static_cast<std::size_t>(num_threads_));
    std::span<float> all(scratch);
#pragma omp parallel for num_threads(num_threads_) schedule(static)
    for (std::int64_t slice = 0; slice < num_threads_; ++slice) {
      const auto row = all.subspan(static_cast<std::size_t>(slice) * columns, columns);
      const std::int64_t end = (slice + 1) * rows / num_threads_;
      for (std::int64_t r = slice * rows / num_threads_; r < end; ++r) {
        const auto index = static_cast<std::size_t>(r);
        dequantize(tensor.type, tensor.data.data() + index * row_bytes, row);
        matrix.set_row(first_row + index, row);
      }
    }
  }

  void advance(const GgufTensor& tensor) {
    done_ += tensor.data.size();
    if (progress_) progress_(done_, total_);
  }

  const Gguf& file_;
  const LoadProgress& progress_;
  WeightType type_;
  int num_threads_;
  std::size_t done_ = 0;
  std::size_t total_ = 0;
  std::set<std::string_view> taken_;
};

LayerWeights load_layer(Loader& loader, const ModelConfig& config, std::int32_t layer) {
  const auto name = [layer](const char* part) {
    return fmt::format("blk.{}.{}.weight", layer, part);
  };
  const auto size = [](std::int32_t value) { return static_cast<std::size_t>(value); };
  const std::size_t width = size(config.width);
  const std::size_t head_dim = size(config.head_dim);
  const std::size_t v_rows = size(config.num_kv_heads) * size(config.head_dim_v);
  LayerWeights weights;
  weights.attention_norm = loader.vector(name("attn_norm"), width);
  weights.qkv = loader.matrix({{name("attn_q"), size(config.num_q_heads) * head_dim},
                               {name("attn_k"), size(config.num_kv_heads) * head_dim},
                               {name("attn_v"), v_rows}},
                              width);
  weights.output = loader.matrix({{name("attn_output"), width}},
                                 size(config.num_q_heads) * size(config.head_dim_v));
  weights.ffn_norm = loader.vector(name("ffn_norm"), width);
  weights.gate_up = loader.matrix(
      {{name("ffn_gate"), size(config.ffn_width)}, {name("ffn_up"), size(config.ffn_width)}},
      width);
  weights.down = loader.matrix({{name("ffn_down"), width}}, size(config.ffn_width));
  return weights;
}

}  // namespace

ModelConfig read_config(const Gguf& file) {
  const auto architecture = file.text("general.architecture");
  if (architecture != "llama") {
    fail("{}: general.architecture: wanted llama, got {}", file.name(),
         architecture ? printable(*architecture) : "none");
  }
  if (file.integer("llama.expert_count").value_or(0) != 0) {
    fail("{}: llama.expert_count: wanted 0 (a dense model), got {}", file.name(),
         *file.integer("llama.expert_count"));
  }
  const auto narrow = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  ModelConfig config;
  config.num_layers = narrow(extent(file, "llama.block_count"));
  config.width = narrow(extent(file, "llama.embedding_length"));
  config.ffn_width = narrow(extent(file, "llama.feed_forward_length"));
  config.context_length =
      extent(file, "llama.context_length", std::numeric_limits<std::int32_t>::max());
  config.num_q_heads = narrow(extent(file, "llama.attention.head_count", config.width));
  config.num_kv_heads =
      narrow(optional_extent(file, "llama.attention.head_count_kv", config.num_q_heads)
                 .value_or(config.num_q_heads));
  if (config.num_q_heads % config.num_kv_heads != 0) {
    fail("{}: llama.attention.head_count_kv: wanted a divisor of {}, got {}", file.name(),
         config.num_q_heads, config.num_kv_heads);
  }
  const auto key_length = optional_extent(file, "llama.attention.key_length", 576);
  if (!key_length && config.width % config.num_q_heads != 0) {
    fail("{}: llama.attention.head_count: wanted a divisor of the width {}, got {}", file.name(),
         config.width, config.num_q_heads);
  }
  config.head_dim = narrow(key_length.value_or(config.width / config.num_q_heads));
  config.head_dim_v =
      narrow(optional_extent(file, "llama.attention.value_length", 576).value_or(config.head_dim));
  config.norm_epsilon =
      static_cast<float>(positive(file, "llama.attention.layer_norm_rms_epsilon", 1e-5));
  read_rope(file, config);
  const GgufTensor* const embedding = file.find_tensor("token_embd.weight");
  if (embedding == nullptr || embedding->shape.size() != 2 || embedding->shape[1] > kMaxExtent) {
    fail("{}: tensor token_embd.weight: wanted [{}, up to {}], got {}", file.name(), config.width,
         kMaxExtent, embedding == nullptr ? "none" : shape_text(embedding->shape));
  }
  config.vocab_size = narrow(embedding->shape[1]);
  return config;
}

Weights load_weights(const Gguf& file, WeightType type, int num_threads,
                     const LoadProgress& progress) {
  Weights weights;
  weights.config = read_config(file);
  const ModelConfig& config = weights.config;
  double elements = 0.0;
  for (const GgufTensor& tensor : file.tensors())
    elements += static_cast<double>(tensor.num_elements);
  demand_memory("weights", elements * (type == WeightType::F32 ? 4.0 : 2.0),
                "--weights bf16 takes half of F32's");

  Loader loader(file, type, num_threads, progress);
  const auto width = static_cast<std::size_t>(config.width);
  const auto vocab_size = static_cast<std::size_t>(config.vocab_size);
  weights.embedding = loader.matrix({{"token_embd.weight", vocab_size}}, width);
  if (loader.has("output.weight")) {
    weights.logits = loader.matrix({{"output.weight", vocab_size}}, width);
  }
  weights.final_norm = loader.vector("output_norm.weight", width);
  if (loader.has("rope_freqs.weight")) {
    weights.rope_factors =
        loader.vector("rope_freqs.weight", static_cast<std::size_t>(config.rotary_dim) / 2);
  }
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    weights.layers.push_back(load_layer(loader, config, layer));
  }
  loader.demand_all_taken();
  return weights;
}

std::size_t Weights::step_bytes() const noexcept {
  std::size_t bytes = logit_matrix().bytes();
  for (const LayerWeights& layer : layers) {
    bytes += layer.qkv.bytes() + layer.output.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  }
  return bytes;
}

double Weights::measure_bandwidth(int num_threads) const {
  using Clock = std::chrono::steady_clock;
  constexpr int kPasses = 3;
  double best = 0.0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = Clock::now();
    std::uint64_t all = logit_matrix().read_all(num_threads);
    for (const LayerWeights& layer : layers) {
      for (const Matrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
        all ^= matrix->read_all(num_threads);
      }
    }
    // The compiler must not see that nobody wants the result.
    [[maybe_unused]] volatile std::uint64_t keep = all;
    const std::chrono::duration<double> seconds = Clock::now() - start;
    best = std::max(best, static_cast<double>(step_bytes()) / seconds.count());
  }
  return best;
}

}  // namespace generate
