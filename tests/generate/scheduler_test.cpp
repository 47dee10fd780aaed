// SPDX-License-Identifier: Apache-2.0
// A whole made-up model over both caches: answers may not depend on how they were scheduled.
#include "examples/generate/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/generate/expect_error.h"
#include "tests/generate/run_model.h"
#include "tests/generate/tiny_model.h"

namespace generate::testing {
namespace {

using octavo::Backend;
using octavo::CacheKind;
using ::testing::Each;
using ::testing::HasSubstr;

const Weights& weights() {
  static const Weights kWeights = [] {
    const auto bytes = TinyModel{}.writer().bytes();
    return load_weights(Gguf(bytes, "tiny.gguf"), WeightType::F32, 2, {});
  }();
  return kWeights;
}

// More prompts than places, of very different lengths.
Job make_job() {
  Job job;
  job.num_token_ids = TinyModel::kVocabSize;
  std::uint32_t seed = 5;
  for (const std::size_t length : {1U, 40U, 7U, 16U, 17U, 64U, 3U, 33U}) {
    std::vector<TokenId> prompt(length);
    for (TokenId& token : prompt) {
      seed = seed * 1664525U + 1013904223U;
      token = static_cast<TokenId>((seed >> 8U) % TinyModel::kVocabSize);
    }
    job.prompts.push_back(std::move(prompt));
  }
  return job;
}

// One at a time, whole prompts, the definition of attention.
const Outcome& reference() {
  static const Outcome kOutcome = run_job(
      weights(), make_job(),
      {.kind = CacheKind::Contiguous, .backend = Backend::Unfused, .batch = 1, .chunk = 1000});
  return kOutcome;
}

class AnySetting : public ::testing::TestWithParam<Setting> {};

TEST_P(AnySetting, GivesTheSameTokens) {
  EXPECT_EQ(run_job(weights(), make_job(), GetParam()).tokens, reference().tokens);
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const Backend backend : {Backend::Cpu, Backend::Unfused}) {
    for (const std::int32_t page_size : {1, 3, 16, 256}) {
      all.push_back({.backend = backend, .page_size = page_size});
    }
    for (const std::int64_t chunk : {1, 5, 64}) {
      all.push_back(
          {.kind = CacheKind::Contiguous, .backend = backend, .batch = 3, .chunk = chunk});
      all.push_back({.backend = backend, .page_size = 4, .batch = 4, .chunk = chunk});
    }
  }
  all.push_back({.num_threads = 1});
  all.push_back({.batch = 1});
  // Barely enough pages for the longest (64 + 23 tokens): much waiting, many evictions.
  all.push_back({.page_size = 4, .num_pages = 22});
  all.push_back({.page_size = 4, .num_pages = 22, .chunk = 3});
  all.push_back({.page_size = 1, .num_pages = 90, .chunk = 7});
  all.push_back({.page_size = 7, .num_pages = 20});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Scheduler, AnySetting, ::testing::ValuesIn(settings()),
                         [](const auto& setting) {
                           std::string name = describe(setting.param);
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

TEST(Scheduler, TheTinyModelSaysMoreThanOneThing) {
  const std::vector<TokenId>& tokens = reference().tokens[1];
  ASSERT_EQ(tokens.size(), 24U);
  EXPECT_THAT(tokens, ::testing::Not(Each(tokens.front())));
  EXPECT_NE(reference().tokens[0], reference().tokens[1]);
}

TEST(Scheduler, SequencesWaitWhenPagesRunOut) {
  const Outcome outcome = run_job(weights(), make_job(), {.page_size = 4, .num_pages = 22});
  EXPECT_GT(outcome.stats.pauses + outcome.stats.evictions, 0);
  EXPECT_THAT(outcome.reasons, Each(FinishReason::Length));
}

// Two prompts that fit side by side, with answers that don't: the later one must give way.
TEST(Scheduler, EvictedSequencesAreComputedAgain) {
  Job job = make_job();
  job.prompts = {job.prompts[3], job.prompts[4]};
  const Outcome outcome = run_job(weights(), job, {.page_size = 4, .num_pages = 11});
  EXPECT_GT(outcome.stats.evictions, 0);
  EXPECT_GT(outcome.stats.recomputed_tokens, 0);
  EXPECT_EQ(outcome.tokens[0], reference().tokens[3]);
  EXPECT_EQ(outcome.tokens[1], reference().tokens[4]);
}

TEST(Scheduler, CountsPromptTokensOnce) {
  const Outcome outcome = run_job(weights(), make_job(), {.page_size = 4, .num_pages = 22});
  std::int64_t wanted = 0;
  for (const auto& prompt : make_job().prompts) wanted += std::ssize(prompt);
  EXPECT_EQ(outcome.stats.prompt_tokens, wanted);
}

TEST(Scheduler, CountsGeneratedTokens) {
  EXPECT_EQ(run_job(weights(), make_job(), {}).stats.generated_tokens, 8 * 24);
}

TEST(Scheduler, StopsAtTheEndOfText) {
  Job job = make_job();
  const std::vector<TokenId>& whole = reference().tokens[1];
  job.ends = {whole[10]};
  const auto first = std::find(whole.begin(), whole.end(), whole[10]);
  const Outcome outcome = run_job(weights(), job, {});
  EXPECT_EQ(outcome.tokens[1], std::vector<TokenId>(whole.begin(), first));
  EXPECT_EQ(outcome.reasons[1], FinishReason::EndOfText);
}

TEST(Scheduler, StopsAtTheLongestSequence) {
  Job job = make_job();
  job.prompts = {job.prompts[5]};
  job.max_seq_len = 70;
  const Outcome outcome = run_job(weights(), job, {});
  // The last token need not be kept: 64 of the prompt, 6 kept, one more.
  EXPECT_EQ(outcome.tokens[0].size(), 7U);
  EXPECT_EQ(outcome.reasons[0], FinishReason::Length);
}

TEST(Scheduler, StopsWhenEvenAloneThereAreTooFewPages) {
  Job job = make_job();
  job.prompts = {job.prompts[1]};
  const Outcome outcome = run_job(weights(), job, {.page_size = 4, .num_pages = 11});
  EXPECT_EQ(outcome.reasons[0], FinishReason::CacheFull);
  // 44 slots: 40 of the prompt, 4 kept, one more.
  const std::vector<TokenId>& whole = reference().tokens[1];
  EXPECT_EQ(outcome.tokens[0], std::vector<TokenId>(whole.begin(), whole.begin() + 5));
}

TEST(Scheduler, RefusesAPromptLongerThanAllPages) {
  EXPECT_EQ(error_of([] { run_job(weights(), make_job(), {.page_size = 4, .num_pages = 9}); }),
            "prompt 2: wanted at most 36 tokens, which is what a sequence may keep in the cache, "
            "got 40");
}

TEST(Scheduler, RefusesAPromptLongerThanASequenceMayBe) {
  Job job = make_job();
  job.max_seq_len = 50;
  EXPECT_THAT(error_of([&] { run_job(weights(), job, {}); }),
              HasSubstr("prompt 6: wanted at most 50 tokens"));
}

TEST(Scheduler, RefusesAnEmptyPrompt) {
  Job job = make_job();
  job.prompts[2].clear();
  EXPECT_EQ(error_of([&] { run_job(weights(), job, {}); }),
            "prompt 3: wanted at least one token, got none");
}

TEST(Scheduler, DrawsDoNotDependOnTheBatch) {
  Job job = make_job();
  job.temperature = 1.0;
  job.seed = 9;
  const Outcome together = run_job(weights(), job, {});
  EXPECT_EQ(run_job(weights(), job, {.page_size = 4, .num_pages = 22, .batch = 3}).tokens,
            together.tokens);
  EXPECT_NE(together.tokens, reference().tokens);
}

TEST(Scheduler, LeavesTheCacheEmpty) {
  CacheChoice choice;
  choice.max_num_seqs = 2;
  choice.max_seq_len = 128;
  choice.num_pages = 16;
  Model model(weights(), choice, 1);
  Outcome outcome;
  Recorder recorder(outcome, 8);
  Scheduler scheduler(
      model, {.batch = 2, .max_tokens = 4, .num_token_ids = 262}, [](TokenId) { return false; },
      recorder);
  scheduler.run(make_job().prompts);
  EXPECT_EQ(model.cache().stats().num_seqs, 0);
  EXPECT_EQ(model.cache().stats().pages_used, 0);
  model.cache().audit();
}

// Positions scaled by a table, with factors of one, are the plain positions.
TEST(Model, ATableOfPlainAnglesChangesNothing) {
  const auto bytes = TinyModel{}.writer().bytes();
  Weights tabled = load_weights(Gguf(bytes, "tiny.gguf"), WeightType::F32, 2, {});
  tabled.rope_factors.assign(4, 1.0F);
  EXPECT_EQ(run_job(tabled, make_job(), {}).tokens, reference().tokens);
}

TEST(Model, ScaledPositionsChangeTheAnswers) {
  const auto bytes = TinyModel{}.writer().bytes();
  Weights scaled = load_weights(Gguf(bytes, "tiny.gguf"), WeightType::F32, 2, {});
  scaled.config.rope_scale = 4.0;
  EXPECT_NE(run_job(scaled, make_job(), {}).tokens, reference().tokens);
}

}  // namespace
}  // namespace generate::testing
