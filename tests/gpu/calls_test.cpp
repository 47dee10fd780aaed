// SPDX-License-Identifier: Apache-2.0
// After construction nothing takes memory or waits: plan, begin, append, attention, replay, and the
// plan of a caller's cache.
#include "testing/spec.h"
#include "tests/conformance/suite.h"
#include "tests/gpu/callers.h"
#include "tests/gpu/cuda_calls.h"
#include "tests/gpu/twins.h"

#include <octavo/backend.h>
#include <octavo/graphed_step.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace octavo::gpu_tests {
namespace {

constexpr std::int32_t kSeqs = 4;

CacheConfig config() {
  CacheConfig c;
  c.num_kv_heads = 2;
  c.head_dim = 64;
  c.dtype = DType::BF16;
  c.max_num_seqs = kSeqs;
  c.max_seq_len = 256;
  c.page_size = 16;
  c.device = kGpu;
  return c;
}

AttentionConfig attention_config(Backend backend) {
  AttentionConfig a;
  a.num_q_heads = 4;
  a.num_kv_heads = 2;
  a.head_dim = 64;
  a.backend = backend;
  return a;
}

/// Prompts and decode steps, a fork with its page copies, a release, a truncation.
StepPlan next_plan(KvCache& cache, int step) {
  if (step == 0) return cache.plan({{1, 40}, {2, 7}, {3, 20}}).plan();
  if (step == 3) static_cast<void>(cache.fork(1, 9));
  if (step == 5) cache.release(2);
  if (step == 6) cache.truncate(1, 11);
  if (step >= 3) return cache.plan({{9, 1}, {1, 1}, {3, 1}}).plan();
  return cache.plan({{1, 1}, {2, 1}, {3, 1}}).plan();
}

struct Tensors {
  TwinTensor q{DType::BF16, {80, 4, 64}, 1};
  TwinTensor k{DType::BF16, {80, 2, 64}, 2};
  TwinTensor v{DType::BF16, {80, 2, 64}, 3};
  TwinTensor out{DType::BF16, {80, 4, 64}, 4};

  [[nodiscard]] LayerInputs inputs() const {
    LayerInputs inputs;
    inputs.q = q.on_gpu();
    inputs.k = k.on_gpu();
    inputs.v = v.on_gpu();
    return inputs;
  }
};

void expect_none_since(const CudaCalls& before, const char* what) {
  const CudaCalls now = cuda_calls();
  EXPECT_EQ(now.memory, before.memory) << what;
  EXPECT_EQ(now.waits, before.waits) << what;
}

class Calls : public GpuTestWith<Backend> {
 protected:
  void SetUp() override {
    GpuTestWith::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) require_backend(GetParam());
  }
};

TEST_F(GpuTest, TheCounterSeesTheLibrarysCalls) {
  const CudaCalls before = cuda_calls();
  const KvCache cache(config());
  EXPECT_GE(cuda_calls().memory, before.memory + 4);
  EXPECT_GE(cuda_calls().waits, before.waits + 1);
}

TEST_P(Calls, OfStepsTakeNoMemoryAndWaitForNothing) {
  KvCache cache(config());
  const Attention attention(attention_config(GetParam()), cache.config());
  const Tensors tensors;
  // What cuDNN prepares for new sizes is the first forward's of those sizes, not every step's.
  for (int round = 0; round < 2; ++round) {
    for (const SequenceId id : cache.sequence_ids()) cache.release(id);
    testkit::synchronize(kGpu);
    for (int step = 0; step < 8; ++step) {
      const CudaCalls before = cuda_calls();
      const StepPlan plan = next_plan(cache, step);
      cache.begin(plan);
      expect_none_since(before, "plan and begin");
      const bool counts = round == 1 || GetParam() != Backend::Fused;
      attention.forward(plan, cache, 0, tensors.inputs(), tensors.out.gpu->view());
      if (counts) expect_none_since(before, "forward");
    }
  }
}

TEST_P(Calls, OfReplaysTakeNoMemoryAndWaitForNothing) {
  KvCache cache(config());
  const Attention attention(attention_config(GetParam()), cache.config());
  const Tensors tensors;
  const StepMaxima maxima{
      .num_seqs = kSeqs, .num_tokens = 80, .max_new_tokens = 40, .max_kv_len = 128};
  GraphedStep graph(attention, cache, maxima,
                    std::vector{LayerTensors{tensors.inputs(), tensors.out.gpu->view(), {}}});
  testkit::synchronize(kGpu);
  const CudaCalls before = cuda_calls();
  for (int step = 0; step < 7; ++step) {
    const StepPlan plan = next_plan(cache, step);
    cache.begin(plan);
    graph.replay(plan);
  }
  expect_none_since(before, "replay");
  EXPECT_EQ(cuda_calls().launches_of_graphs, before.launches_of_graphs + 7);
}

TEST_P(Calls, OverACallersCacheTakeNoMemoryAndWaitForNothing) {
  const testkit::Case value =
      testkit::make_case(testkit::parse_spec("b3 q1 s40 steps1 hq4 hkv2 d64 p16 bf16 seed151"));
  GpuCallersCache cache(value, PoolLayout::Nhd, 16);
  const Tensors tensors;
  cache.prepare(value.steps[0]);
  const LayerInputs inputs = tensors.inputs();
  const AttentionConfig a = attention_config(GetParam());
  const StepArrays& arrays = cache.arrays();
  cache.take_workspace(a, inputs, tensors.out.gpu->view(), nullptr);
  testkit::synchronize(kGpu);
  for (int step = 0; step < 4; ++step) {
    const CudaCalls before = cuda_calls();
    cache.workspace().plan(cache.view(), arrays);
    append_tokens(a, cache.view(), arrays, inputs);
    attend(a, cache.view(), arrays, inputs, tensors.out.gpu->view());
    expect_none_since(before, "plan, append_tokens, attend");
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Calls,
                         ::testing::Values(Backend::Unfused, Backend::Fused, Backend::Flash2),
                         conformance::backend_name);

}  // namespace
}  // namespace octavo::gpu_tests
