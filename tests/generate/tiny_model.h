// SPDX-License-Identifier: Apache-2.0
// A made-up language model of the Llama architecture, small enough to run in a blink: random
// weights, a vocabulary of single bytes, a few merges and the control tokens of ChatML.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "examples/generate/utf8.h"
#include "tests/generate/gguf_writer.h"

namespace generate::testing {

struct TinyModel {
  std::uint32_t num_layers = 2;
  std::uint32_t width = 48;
  std::uint32_t ffn_width = 80;
  std::uint32_t num_q_heads = 6;
  std::uint32_t num_kv_heads = 2;
  std::uint32_t context_length = 160;
  std::string architecture = "llama";
  std::string tokenizer = "gpt2";
  std::string pretokenizer = "smollm";
  std::string chat_template =
      "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
      "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
      "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
      "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
  bool tied_output = true;
  bool biases = false;

  static constexpr std::int32_t kNumMerges = 4;
  static constexpr std::int32_t kStart = 256 + kNumMerges;  // <|im_start|>
  static constexpr std::int32_t kEnd = kStart + 1;          // <|im_end|>
  static constexpr std::int32_t kVocabSize = kEnd + 1;

  /// The character that stands for a byte in such vocabularies.
  static std::string byte_name(int byte) {
    static const std::array<std::string, 256> kNames = [] {
      std::array<std::string, 256> names;
      char32_t next = 0x100;
      for (std::uint32_t b = 0; b < 256; ++b) {
        const bool plain = (b > 0x20 && b < 0x7F) || (b > 0xA0 && b != 0xAD);
        append_utf8(names[b], plain ? static_cast<char32_t>(b) : next++);
      }
      return names;
    }();
    return kNames[static_cast<std::size_t>(byte)];
  }

  /// Without tensors when `with_tensors` is false: enough for a tokenizer.
  [[nodiscard]] GgufWriter writer(bool with_tensors = true) const {
    GgufWriter file;
    file.add_text("general.architecture", architecture);
    file.add_u32("llama.block_count", num_layers);
    file.add_u32("llama.context_length", context_length);
    file.add_u32("llama.embedding_length", width);
    file.add_u32("llama.feed_forward_length", ffn_width);
    file.add_u32("llama.attention.head_count", num_q_heads);
    file.add_u32("llama.attention.head_count_kv", num_kv_heads);
    file.add_f32("llama.attention.layer_norm_rms_epsilon", 1e-5F);
    file.add_f32("llama.rope.freq_base", 1000.0F);
    add_vocabulary(file);
    if (with_tensors) add_tensors(file);
    return file;
  }

 private:
  void add_vocabulary(GgufWriter& file) const {
    std::vector<std::string> tokens;
    std::vector<std::int32_t> types;
    for (int byte = 0; byte < 256; ++byte) tokens.push_back(byte_name(byte));
    const std::string space = byte_name(' ');
    tokens.insert(tokens.end(), {"th", "the", space + "the", "an"});
    types.resize(tokens.size(), 1);
    tokens.insert(tokens.end(), {"<|im_start|>", "<|im_end|>"});
    types.resize(tokens.size(), 3);
    file.add_text("tokenizer.ggml.model", tokenizer);
    file.add_text("tokenizer.ggml.pre", pretokenizer);
    file.add_texts("tokenizer.ggml.tokens", tokens);
    file.add_i32s("tokenizer.ggml.token_type", types);
    file.add_texts("tokenizer.ggml.merges", {"t h", "th e", space + " the", "a n"});
    file.add_u32("tokenizer.ggml.eos_token_id", kEnd);
    if (!chat_template.empty()) file.add_text("tokenizer.chat_template", chat_template);
  }

  void add_tensors(GgufWriter& file) const {
    std::mt19937 random(20240607);
    const auto add = [&](const std::string& name, std::vector<std::uint64_t> shape, float scale,
                         float offset) {
      std::uint64_t count = 1;
      for (const std::uint64_t extent : shape) count *= extent;
      std::vector<float> values(count);
      for (float& value : values) {
        value = (static_cast<float>(random() % 20001) / 10000.0F - 1.0F) * scale + offset;
      }
      file.add_f32_tensor(name, std::move(shape), values);
    };
    const std::uint64_t head_dim = width / num_q_heads;
    const std::uint64_t kv_width = num_kv_heads * head_dim;
    add("token_embd.weight", {width, kVocabSize}, 1.0F, 0.0F);
    if (!tied_output) add("output.weight", {width, kVocabSize}, 1.0F, 0.0F);
    add("output_norm.weight", {width}, 0.2F, 1.0F);
    for (std::uint32_t layer = 0; layer < num_layers; ++layer) {
      const std::string prefix = "blk." + std::to_string(layer) + ".";
      add(prefix + "attn_norm.weight", {width}, 0.2F, 1.0F);
      add(prefix + "attn_q.weight", {width, width}, 0.5F, 0.0F);
      add(prefix + "attn_k.weight", {width, kv_width}, 0.5F, 0.0F);
      add(prefix + "attn_v.weight", {width, kv_width}, 0.5F, 0.0F);
      add(prefix + "attn_output.weight", {width, width}, 0.5F, 0.0F);
      add(prefix + "ffn_norm.weight", {width}, 0.2F, 1.0F);
      add(prefix + "ffn_gate.weight", {width, ffn_width}, 0.3F, 0.0F);
      add(prefix + "ffn_up.weight", {width, ffn_width}, 0.3F, 0.0F);
      add(prefix + "ffn_down.weight", {ffn_width, width}, 0.3F, 0.0F);
      if (biases) add(prefix + "attn_q.bias", {width}, 0.1F, 0.0F);
    }
  }
};

}  // namespace generate::testing
