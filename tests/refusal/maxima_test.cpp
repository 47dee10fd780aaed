// SPDX-License-Identifier: Apache-2.0
// Maxima on the CPU, and what is for GPUs alone where there is none.
#include "device/gpu.h"
#include "testing/host_tensor.h"
#include "tests/refusal/expect.h"

#include <octavo/attention.h>
#include <octavo/graphed_step.h>
#include <octavo/workspace.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace octavo::refusal {
namespace {

using testkit::HostTensor;

CacheConfig cache_config() {
  CacheConfig config;
  config.num_kv_heads = 1;
  config.head_dim = 8;
  config.max_num_seqs = 3;
  config.max_seq_len = 40;
  config.page_size = 4;
  return config;
}

AttentionConfig attention_config() {
  AttentionConfig config;
  config.head_dim = 8;
  return config;
}

/// A step of 3 + 1 tokens in tensors for 6.
constexpr std::int64_t kFilled = std::int64_t{4} * 8;  // elements

class WithMaxima : public ::testing::Test {
 protected:
  WithMaxima()
      : cache_(cache_config()),
        attention_(attention_config(), cache_config()),
        plan_(cache_.plan({{0, 3}, {1, 1}}).plan()),
        q_(DType::F32, {6, 1, 8}),
        out_(DType::F32, {6, 1, 8}) {
    for (std::int64_t i = 0; i < kFilled; ++i) q_.set(i, static_cast<double>(i % 7) - 3.0);
    cache_.begin(plan_);
    inputs_.q = inputs_.k = inputs_.v = q_.view();
    inputs_.maxima = &maxima_;
  }

  void run() { attention_.forward(plan_, cache_, 0, inputs_, out_.view()); }

  KvCache cache_;
  Attention attention_;
  StepPlan plan_;
  HostTensor q_, out_;
  StepMaxima maxima_{.num_seqs = 3, .num_tokens = 6, .max_new_tokens = 5, .max_kv_len = 40};
  LayerInputs inputs_;
};

TEST_F(WithMaxima, StepWithinThemGivesTheSame) {
  run();
  const HostTensor with = out_;
  inputs_.maxima = nullptr;
  run();
  EXPECT_TRUE(out_ == with);
  for (std::int64_t i = kFilled; i < out_.size(); ++i) EXPECT_EQ(out_.get(i), 0.0);
}

TEST_F(WithMaxima, StepBeyondThemIsRefused) {
  maxima_.num_seqs = 1;
  EXPECT_EQ(message_of([&] { run(); }), "plan.num_seqs: wanted at most 1, got 2");
  maxima_ = {.num_seqs = 2, .num_tokens = 3, .max_new_tokens = 3, .max_kv_len = 3};
  EXPECT_EQ(message_of([&] { run(); }), "plan.num_tokens: wanted at most 3, got 4");
  maxima_ = {.num_seqs = 2, .num_tokens = 4, .max_new_tokens = 2, .max_kv_len = 3};
  EXPECT_EQ(message_of([&] { run(); }), "plan.max_new_tokens: wanted at most 2, got 3");
  maxima_ = {.num_seqs = 2, .num_tokens = 4, .max_new_tokens = 3, .max_kv_len = 2};
  EXPECT_EQ(message_of([&] { run(); }), "plan.max_kv_len: wanted at most 2, got 3");
}

TEST_F(WithMaxima, TensorsSmallerThanThemAreRefused) {
  maxima_.num_tokens = 7;
  EXPECT_EQ(message_of([&] { run(); }), "k.shape: wanted [>= 7, 1, 8] (thd), got [6, 1, 8]");
}

TEST_F(WithMaxima, TablesOfRopeShorterThanThemAreRefused) {
  const std::vector<float> table(std::size_t{39} * 4, 0.5F);
  Rope rope{.cos = table.data(), .sin = table.data(), .num_table_positions = 39};
  inputs_.rope = &rope;
  EXPECT_EQ(message_of([&] { run(); }),
            "rope.num_table_positions: wanted at least 40 (the most keys of a step), got 39");
  maxima_.max_kv_len = 39;
  run();
}

TEST_F(WithMaxima, GraphedStepsAreForGpus) {
  const bool compiled = device::gpu_report().compiled;
  const std::string message = message_of(
      [&] {
        const std::vector<LayerTensors> layers{{inputs_, out_.view(), {}}};
        GraphedStep graph(attention_, cache_, maxima_, layers);
      },
      compiled ? ErrorCode::InvalidArgument : ErrorCode::NotCompiled);
  EXPECT_THAT(message, ::testing::StartsWith("cache.device: wanted cuda, got cpu"));
}

TEST(WorkspaceOfAGpu, IsNotForTheCpu) {
  const std::string message = message_of([] { Workspace workspace(Device{}); });
  EXPECT_EQ(message, "device: wanted cuda, got cpu");
}

TEST(WorkspaceOfAGpu, IsRefusedWhereThereIsNoCudaPart) {
  const bool compiled = device::gpu_report().compiled;
  if (compiled && !device::gpu_report().gpus.empty()) GTEST_SKIP() << "there is a GPU";
  const std::string message = message_of(
      [] {
        Workspace workspace(Device{DeviceType::Cuda, 0});
      },
      compiled ? ErrorCode::DeviceFailure : ErrorCode::NotCompiled);
  EXPECT_THAT(message, ::testing::HasSubstr("device"));
}

TEST(CallersCacheOnAGpu, IsRefusedWhereThereIsNoCudaPart) {
  const bool compiled = device::gpu_report().compiled;
  if (compiled && !device::gpu_report().gpus.empty()) GTEST_SKIP() << "there is a GPU";
  HostTensor pool(DType::F32, {4, 4, 1, 8});
  KvView view;
  view.k = view.v = pool.view();
  view.k.device = view.v.device = {DeviceType::Cuda, 0};
  const ErrorCode code = compiled ? ErrorCode::DeviceFailure : ErrorCode::NotCompiled;
  const std::int32_t offsets[] = {0, 1};
  const std::int32_t lens[] = {1};
  LayerInputs inputs;
  HostTensor out(DType::F32, {1, 1, 8});
  const StepArrays step{1, 1, offsets, lens};
  const auto named = ::testing::StartsWith("cache.k.device: wanted");
  EXPECT_THAT(message_of([&] { attend(attention_config(), view, step, inputs, out.view()); }, code),
              named);
  EXPECT_THAT(message_of([&] { append_tokens(attention_config(), view, step, inputs); }, code),
              named);
  EXPECT_THAT(
      message_of([&] { static_cast<void>(explain(attention_config(), view, inputs)); }, code),
      named);
}

}  // namespace
}  // namespace octavo::refusal
