// SPDX-License-Identifier: Apache-2.0
// The real model's greedy answers in float32, token for token, whatever the cache, the page size,
// the batch, the chunks and the backend. Needs the model, and skips without it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "examples/generate/chat.h"
#include "examples/generate/options.h"
#include "testing/device_memory.h"
#include "tests/generate/run_model.h"

namespace generate::testing {
namespace {

using octavo::Backend;
using octavo::CacheKind;

std::string model_path() {
  const char* const given = std::getenv("OCTAVO_TEST_MODEL");
  return given != nullptr ? given : default_model_path();
}

class Golden : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(model_path())) {
      GTEST_SKIP() << "no model at " << model_path()
                   << ": `./dev generate` fetches it, or set OCTAVO_TEST_MODEL";
    }
    const MappedFile mapped(model_path());
    const Gguf file(mapped.bytes(), model_path());
    const Tokenizer tokenizer(file);
    const ChatTemplate chat(file, tokenizer);
    weights_ = load_weights(file, WeightType::F32, 2, {});
    job_.num_token_ids = tokenizer.num_tokens();
    job_.max_tokens = 48;
    for (TokenId token = 0; token < tokenizer.num_tokens(); ++token) {
      if (tokenizer.ends_text(token)) job_.ends.push_back(token);
    }
    std::ifstream in(std::string(OCTAVO_TEST_DATA_DIR) + "/generate.json");
    const auto golden = nlohmann::json::parse(in);
    for (const auto& answer : golden["answers"]) {
      job_.prompts.push_back(chat.encode(tokenizer, answer["prompt"].get<std::string>()));
      EXPECT_EQ(job_.prompts.back(), answer["prompt_tokens"].get<std::vector<TokenId>>());
      tokens_.push_back(answer["tokens"].get<std::vector<TokenId>>());
      std::string text;
      for (const TokenId token : tokens_.back()) text += tokenizer.bytes(token);
      EXPECT_EQ(text, answer["text"].get<std::string>());
    }
    ASSERT_EQ(tokens_.size(), 2U);
  }

  void expect_golden(const Setting& setting) const {
    EXPECT_EQ(run_job(weights_, job_, setting).tokens, tokens_) << describe(setting);
  }

  Weights weights_;
  Job job_;
  std::vector<std::vector<TokenId>> tokens_;
};

TEST_F(Golden, PagedWithPagesOfOneToken) { expect_golden({.page_size = 1}); }
TEST_F(Golden, PagedWithPagesOfThreeTokens) { expect_golden({.page_size = 3}); }
TEST_F(Golden, PagedWithPagesOfSixteenTokens) { expect_golden({.page_size = 16}); }
TEST_F(Golden, PagedWithPagesOf256Tokens) { expect_golden({.page_size = 256}); }
TEST_F(Golden, Contiguous) { expect_golden({.kind = CacheKind::Contiguous}); }
TEST_F(Golden, UnfusedPaged) { expect_golden({.backend = Backend::Unfused, .page_size = 3}); }
TEST_F(Golden, UnfusedContiguous) {
  expect_golden({.kind = CacheKind::Contiguous, .backend = Backend::Unfused});
}
TEST_F(Golden, OneAtATime) { expect_golden({.batch = 1}); }
TEST_F(Golden, PromptsInChunksOfFive) { expect_golden({.chunk = 5}); }

TEST_F(Golden, OnAGpu) {
  const std::string trouble = octavo::testkit::device_trouble({octavo::DeviceType::Cuda, 0});
  if (!trouble.empty()) GTEST_SKIP() << trouble;
  const octavo::Device gpu{octavo::DeviceType::Cuda, 0};
  expect_golden({.backend = Backend::Unfused, .device = gpu});
  expect_golden(
      {.kind = CacheKind::Contiguous, .backend = Backend::Unfused, .chunk = 5, .device = gpu});
}

TEST_F(Golden, AmongOtherPrompts) {
  const std::vector<std::vector<TokenId>> asked = job_.prompts;
  job_.prompts = {asked[1], asked[0], asked[1], asked[0], asked[1]};
  tokens_ = {tokens_[1], tokens_[0], tokens_[1], tokens_[0], tokens_[1]};
  expect_golden({.batch = 4, .chunk = 24});
}

// 71 prompt tokens and 55 more, in 88 slots: the second answer waits for pages.
TEST_F(Golden, WithTooFewPagesForBoth) { expect_golden({.page_size = 4, .num_pages = 22}); }

}  // namespace
}  // namespace generate::testing
