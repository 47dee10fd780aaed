// SPDX-License-Identifier: Apache-2.0
// Auto where the workspace is too small for the backend that it prefers.
#include "testing/case.h"
#include "testing/spec.h"
#include "tests/gpu/fixed_tensors.h"
#include "tests/gpu/gpu_test.h"
#include "tests/gpu/refusal.h"

#include <octavo/graphed_step.h>

#include <gmock/gmock.h>

#include <cstdint>
#include <string>
#include <vector>

namespace octavo::gpu_tests {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> missing(const Explanation& explanation, Backend backend) {
  for (const Support& support : explanation.backends) {
    if (support.backend == backend) return support.missing;
  }
  return {};
}

/// Prompts over long contexts want more of flash2's partials than unfused wants of anything.
class ShortOfRoom : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) require_backend(Backend::Flash2);
    if (IsSkipped() || HasFatalFailure()) return;
    config_.num_q_heads = 32;
    config_.num_kv_heads = 8;
    config_.head_dim = 128;
    cache_config_ = small();
    cache_config_.num_kv_heads = 8;
    cache_config_.head_dim = 128;
    cache_config_.max_num_seqs = maxima_.num_seqs;
    cache_config_.max_seq_len = maxima_.max_kv_len;
    cache_config_.page_size = 16;
    cache_config_.num_pages = 256;
    cache_config_.workspace_bytes = std::int64_t{48} << 20U;
  }

  const StepMaxima maxima_{
      .num_seqs = 64, .num_tokens = 1024, .max_new_tokens = 512, .max_kv_len = 4096};
  AttentionConfig config_;
  CacheConfig cache_config_;
};

TEST_F(ShortOfRoom, AutoTakesTheNextBackendAndSaysWhy) {
  KvCache cache(cache_config_);
  const Attention attention(config_, cache_config_);
  const StepPlan plan = cache.plan({{1, 1}}).plan();
  EXPECT_EQ(attention.explain(plan, TensorFormat::Thd).chosen, Backend::Flash2);
  const Explanation bounded = attention.explain(plan, TensorFormat::Thd, &maxima_);
  EXPECT_EQ(bounded.chosen, Backend::Unfused);
  EXPECT_THAT(missing(bounded, Backend::Flash2),
              ::testing::ElementsAre(HasSubstr("bytes of workspace (there are 50331648)")));
}

TEST_F(ShortOfRoom, ABackendThatIsNamedIsRefused) {
  config_.backend = Backend::Flash2;
  KvCache cache(cache_config_);
  const Attention attention(config_, cache_config_);
  const StepPlan plan = cache.plan({{1, 1}}).plan();
  cache.begin(plan);
  const testkit::DeviceTensor q(kGpu, testkit::HostTensor(DType::BF16, {1024, 32, 128}));
  const testkit::DeviceTensor out(kGpu, testkit::HostTensor(DType::BF16, {1024, 32, 128}));
  LayerInputs inputs;
  inputs.q = q.view();
  inputs.maxima = &maxima_;
  EXPECT_THAT(refused([&] { attention.attend(plan, cache, 0, inputs, out.view()); }),
              HasSubstr("workspace_bytes: wanted at least"));
}

TEST_F(ShortOfRoom, AGraphedStepIsMadeForTheNextBackendAndReplaysRight) {
  const testkit::Case value =
      testkit::make_case(testkit::parse_spec("b2 q1 s40 steps3 hq32 hkv8 d128 p16 bf16 seed151"));
  KvCache cache(cache_config_);
  const Attention attention(config_, cache_config_);
  FixedTensors tensors(value, maxima_);
  GraphedStep graph(attention, cache, maxima_, std::vector{tensors.layer()});
  EXPECT_EQ(graph.backend(), Backend::Unfused);
  testkit::Comparison total;
  for (std::size_t i = 0; i < value.steps.size(); ++i) {
    const StepPlan plan = cache.plan(value.steps[i].sequences).plan();
    cache.begin(plan);
    tensors.upload(value.steps[i]);
    graph.replay(plan);
    tensors.compare(i, total);
  }
  EXPECT_TRUE(total.ok()) << total.worst.to_string();
}

}  // namespace
}  // namespace octavo::gpu_tests
