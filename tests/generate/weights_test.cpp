// SPDX-License-Identifier: Apache-2.0
// Which models are loaded, and how others are refused.
#include "examples/generate/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/generate/expect_error.h"
#include "tests/generate/tiny_model.h"

namespace generate::testing {
namespace {

using ::testing::HasSubstr;

Weights load(const GgufWriter& file, WeightType type = WeightType::F32) {
  const auto bytes = file.bytes();
  return load_weights(Gguf(bytes, "tiny.gguf"), type, 2, {});
}

std::string refusal(const GgufWriter& file) {
  return error_of([&] { load(file); });
}

TEST(Weights, ReadsTheSizes) {
  const ModelConfig config = load(TinyModel{}.writer()).config;
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.rotary_dim, 8);
  EXPECT_EQ(config.vocab_size, TinyModel::kVocabSize);
  EXPECT_EQ(config.rope_base, 1000.0);
}

TEST(Weights, TheEmbeddingServesForLogitsWhenThereIsNoOther) {
  const Weights weights = load(TinyModel{}.writer());
  EXPECT_EQ(&weights.logit_matrix(), &weights.embedding);
}

TEST(Weights, AnOutputMatrixOfItsOwnIsTaken) {
  TinyModel model;
  model.tied_output = false;
  const Weights weights = load(model.writer());
  EXPECT_EQ(&weights.logit_matrix(), &weights.logits);
}

TEST(Weights, BfloatTakesHalfTheBytes) {
  const std::size_t whole = load(TinyModel{}.writer(), WeightType::F32).step_bytes();
  EXPECT_EQ(load(TinyModel{}.writer(), WeightType::Bf16).step_bytes() * 2, whole);
}

TEST(Weights, ReportsProgressUpToTheEnd) {
  const auto bytes = TinyModel{}.writer().bytes();
  std::size_t last = 0;
  std::size_t all = 1;
  load_weights(Gguf(bytes, "tiny.gguf"), WeightType::F32, 1,
               [&](std::size_t done, std::size_t total) {
                 EXPECT_GT(done, last);
                 last = done;
                 all = total;
               });
  EXPECT_EQ(last, all);
}

TEST(Weights, RefusesAnotherArchitectureByName) {
  TinyModel model;
  model.architecture = "qwen2";
  EXPECT_EQ(refusal(model.writer()), "tiny.gguf: general.architecture: wanted llama, got qwen2");
}

TEST(Weights, RefusesAMixtureOfExperts) {
  GgufWriter file = TinyModel{}.writer();
  file.add_u32("llama.expert_count", 8);
  EXPECT_THAT(refusal(file), HasSubstr("llama.expert_count: wanted 0 (a dense model), got 8"));
}

TEST(Weights, RefusesAnUnknownScalingOfPositions) {
  GgufWriter file = TinyModel{}.writer();
  file.add_text("llama.rope.scaling.type", "yarn");
  EXPECT_THAT(refusal(file), HasSubstr("wanted none or linear, got yarn"));
}

TEST(Weights, RefusesTensorsThatItWouldLeaveOut) {
  TinyModel model;
  model.biases = true;
  EXPECT_THAT(refusal(model.writer()), HasSubstr("tensor blk.0.attn_q.bias: wanted none of that"));
}

TEST(Weights, RefusesHeadsThatDoNotDivideTheWidth) {
  TinyModel model;
  model.num_q_heads = 10;
  model.num_kv_heads = 2;
  EXPECT_THAT(refusal(model.writer()), HasSubstr("wanted a divisor of the width 48, got 10"));
}

TEST(Weights, RefusesKvHeadsThatDoNotDivideTheHeads) {
  TinyModel model;
  model.num_kv_heads = 4;
  EXPECT_THAT(refusal(model.writer()), HasSubstr("head_count_kv: wanted a divisor of 6, got 4"));
}

TEST(Weights, RefusesAMissingTensorByName) {
  GgufWriter file = TinyModel{}.writer(false);
  file.add_f32_tensor("token_embd.weight", {48, TinyModel::kVocabSize},
                      std::vector<float>(48 * TinyModel::kVocabSize));
  EXPECT_EQ(refusal(file), "tiny.gguf: tensor output_norm.weight: wanted [48], got none");
}

TEST(Weights, RefusesATypeThatItCannotReadByName) {
  GgufWriter file = TinyModel{}.writer(false);
  file.describe_tensor("token_embd.weight", {48, TinyModel::kVocabSize}, static_cast<GgmlType>(14),
                       0);
  EXPECT_EQ(refusal(file),
            "tiny.gguf: tensor token_embd.weight: wanted F32, F16, BF16, Q8_0, Q4_0 or Q4_1, got "
            "Q6_K");
}

TEST(Weights, RefusesATensorOfAnotherShape) {
  GgufWriter file = TinyModel{}.writer(false);
  file.add_f32_tensor("token_embd.weight", {24, 2}, std::vector<float>(48));
  EXPECT_EQ(refusal(file), "tiny.gguf: tensor token_embd.weight: wanted [48, 2], got [24, 2]");
}

TEST(Weights, RefusesAnAbsurdNumberOfLayers) {
  GgufWriter file;
  file.add_text("general.architecture", "llama");
  file.add_u32("llama.block_count", 0xFFFFFFFF);
  EXPECT_THAT(refusal(file), HasSubstr("llama.block_count: wanted 1 to 16777216, got 4294967295"));
}

}  // namespace
}  // namespace generate::testing
