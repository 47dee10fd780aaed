// SPDX-License-Identifier: Apache-2.0
// A GPU's memory where the CPU's is due: what is said, before anything is read.
#include "tests/gpu/refusal.h"
#include "tests/gpu/twins.h"

#include <octavo/error.h>
#include <octavo/workspace.h>

#include <string>
#include <vector>

namespace octavo::gpu_tests {
namespace {

/// A step of the CPU's, right but for pointers that a test takes from the GPU.
class HostLayer : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    config_.device = {};
    cache_.emplace(config_);
    plan_ = cache_->plan({{1, 3}}).plan();
    cache_->begin(plan_);
    q_.emplace(DType::BF16, std::vector<std::int64_t>{3, 2, 16}, 1);
    out_.emplace(DType::BF16, std::vector<std::int64_t>{3, 2, 16}, 2);
    inputs_.q = inputs_.k = inputs_.v = q_->on_host();
    on_gpu_ = testkit::DeviceMemory(kGpu, 4096);
    ints_ = reinterpret_cast<const std::int32_t*>(on_gpu_.data());
    floats_ = reinterpret_cast<const float*>(on_gpu_.data());
  }

  std::string forward() {
    TensorView out = out_->host.view();
    if (out_is_on_gpu_) out.data = on_gpu_.data();
    return refused(
        [&] { Attention(attention(), config_).forward(plan_, *cache_, 0, inputs_, out, nullptr); });
  }

  CacheConfig config_ = small();
  std::optional<KvCache> cache_;
  StepPlan plan_;
  std::optional<TwinTensor> q_, out_;
  LayerInputs inputs_;
  bool out_is_on_gpu_ = false;
  testkit::DeviceMemory on_gpu_;
  const std::int32_t* ints_ = nullptr;
  const float* floats_ = nullptr;
};

TEST_F(HostLayer, TakesTheHostsMemory) { EXPECT_EQ(forward(), "nothing was thrown"); }

TEST_F(HostLayer, NamesTensorsInAGpusMemory) {
  inputs_.q.data = on_gpu_.data();
  EXPECT_EQ(forward(), "q.data: wanted memory of the host, got memory of cuda:0");
  inputs_.q = q_->on_host();
  inputs_.k.data = on_gpu_.data();
  EXPECT_EQ(forward(), "k.data: wanted memory of the host, got memory of cuda:0");
  inputs_.k = q_->on_host();
  inputs_.v.data = on_gpu_.data();
  EXPECT_EQ(forward(), "v.data: wanted memory of the host, got memory of cuda:0");
  inputs_.v = q_->on_host();
  out_is_on_gpu_ = true;
  EXPECT_EQ(forward(), "out.data: wanted memory of the host, got memory of cuda:0");
}

TEST_F(HostLayer, NamesATensorThatSaysItIsAGpus) {
  inputs_.k = q_->on_gpu();
  EXPECT_EQ(forward(), "k.device: wanted cpu, got cuda:0");
}

TEST_F(HostLayer, NamesSlopesSinksAndPositionsInAGpusMemory) {
  inputs_.alibi_slopes = floats_;
  EXPECT_EQ(forward(), "alibi_slopes: wanted memory of the host, got memory of cuda:0");
  inputs_.alibi_slopes = nullptr;
  inputs_.sinks = floats_;
  EXPECT_EQ(forward(), "sinks: wanted memory of the host, got memory of cuda:0");
  inputs_.sinks = nullptr;
  Rope rope;
  inputs_.rope = &rope;
  inputs_.positions = ints_;
  EXPECT_EQ(forward(), "positions: wanted memory of the host, got memory of cuda:0");
  inputs_.positions = nullptr;
  rope = {.cos = floats_, .sin = floats_, .num_table_positions = 8};
  EXPECT_EQ(forward(), "rope.cos: wanted memory of the host, got memory of cuda:0");
}

TEST_F(HostLayer, NamesACachesOwnMemoryInAGpus) {
  CacheConfig c = config_;
  c.num_pages = 4;
  c.keys = TensorView(on_gpu_.data(), DType::BF16, {1, 4, 16, 2, 16});
  c.values = c.keys;
  EXPECT_EQ(refused([&] { KvCache cache(c); }),
            "keys.data: wanted memory of the host, got memory of cuda:0");
  c.device = kGpu;
  EXPECT_EQ(refused([&] { KvCache cache(c); }), "keys.device: wanted cuda:0, got cpu");
}

/// The same for a cache that the caller manages.
class HostCallersCache : public HostLayer {
 protected:
  void SetUp() override {
    HostLayer::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    view_.k = TensorView(keys_.data(), DType::BF16, {2, 4, 2, 16});
    view_.v = view_.k;
    view_.page_table = table_;
    view_.page_table_stride = view_.max_pages_per_seq = 2;
    view_.num_rows = 1;
    view_.row_indices = row_;
    step_ = {.num_seqs = 1, .num_tokens = 3, .token_offsets = offsets_, .kv_lens = len_};
  }

  std::string append() {
    return refused([&] { append_tokens(attention(), view_, step_, inputs_); });
  }
  std::string attend() {
    return refused(
        [&] { octavo::attend(attention(), view_, step_, inputs_, out_->host.view(), nullptr); });
  }

  std::vector<std::uint16_t> keys_ = std::vector<std::uint16_t>(2 * 4 * 2 * 16);
  const std::int32_t table_[2] = {1, 0};
  const std::int32_t row_[1] = {0};
  const std::int32_t len_[1] = {3};
  const std::int32_t offsets_[2] = {0, 3};
  KvView view_;
  StepArrays step_;
};

TEST_F(HostCallersCache, TakesTheHostsMemory) {
  EXPECT_EQ(append(), "nothing was thrown");
  EXPECT_EQ(attend(), "nothing was thrown");
}

TEST_F(HostCallersCache, NamesArraysInAGpusMemory) {
  const auto expect = [&](const char* name) {
    const std::string text =
        std::string(name) + ": wanted memory of the host, got memory of cuda:0";
    EXPECT_EQ(append(), text);
    EXPECT_EQ(attend(), text);
  };
  const KvView view = view_;
  const StepArrays step = step_;
  view_.k.data = on_gpu_.data();
  expect("cache.k.data");
  view_ = view;
  view_.v.data = on_gpu_.data();
  expect("cache.v.data");
  view_ = view;
  view_.page_table = ints_;
  expect("cache.page_table");
  view_ = view;
  view_.row_indices = ints_;
  expect("cache.row_indices");
  view_ = view;
  step_.kv_lens = ints_;
  expect("step.kv_lens");
  step_ = step;
  step_.token_offsets = ints_;
  expect("step.token_offsets");
}

TEST_F(HostCallersCache, NamesAGpusCacheInTheHostsMemory) {
  Workspace workspace(kGpu);
  const testkit::DeviceMemory memory(kGpu, 1 << 16);
  workspace.use(memory.data(), 1 << 16);
  step_.workspace = &workspace;
  view_.k.device = view_.v.device = kGpu;
  const std::string text = "cache.k.data: wanted memory of cuda:0, got memory of the host";
  EXPECT_EQ(append(), text);
  EXPECT_EQ(attend(), text);
  EXPECT_EQ(refused([&] { workspace.plan(view_, step_); }), text);
}

}  // namespace
}  // namespace octavo::gpu_tests
