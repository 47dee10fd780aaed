// SPDX-License-Identifier: Apache-2.0
// fused over a contiguous cache of ours: without a table where the sequences lie in order, by the
// table elsewhere and in captured graphs. Against unfused over the same cache.
#include "tests/gpu/twins.h"

#include <octavo/backend.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace octavo::gpu_tests {
namespace {

constexpr std::int32_t kHeads = 2;
constexpr std::int32_t kQueryHeads = 4;
constexpr std::int32_t kDim = 64;
constexpr std::int64_t kTokens = 128;

CacheConfig config() {
  CacheConfig c;
  c.kind = CacheKind::Contiguous;
  c.num_kv_heads = kHeads;
  c.head_dim = kDim;
  c.dtype = DType::F16;
  c.max_num_seqs = 6;
  c.max_seq_len = 500;
  c.device = kGpu;
  return c;
}

AttentionConfig attention(Backend backend) {
  AttentionConfig a;
  a.num_q_heads = kQueryHeads;
  a.num_kv_heads = kHeads;
  a.head_dim = kDim;
  a.backend = backend;
  return a;
}

class GpuFusedRows : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    require_backend(Backend::Fused);
    if (IsSkipped() || HasFatalFailure()) return;
    cache_.emplace(config());
    // Sequences 1 … 5 in pages 0 … 4; nobody may see the pages of those that are not in a step.
    begin({{1, 90}, {2, 200}, {3, 70}, {4, 150}, {5, 128}});
    LayerInputs inputs;
    const TwinTensor k(DType::F16, {638, kHeads, kDim}, 1);
    const TwinTensor v(DType::F16, {638, kHeads, kDim}, 2);
    inputs.k = k.on_gpu();
    inputs.v = v.on_gpu();
    Attention(attention(Backend::Unfused), cache_->config()).append(*plan_, *cache_, 0, inputs);
    testkit::synchronize(kGpu);
  }

  void begin(const std::vector<SequenceStep>& lines) {
    plan_ = cache_->plan(lines).plan();
    cache_->begin(*plan_);
  }

  [[nodiscard]] LayerInputs inputs() const {
    LayerInputs inputs;
    inputs.q = q_.on_gpu();
    inputs.k = k_.on_gpu();
    inputs.v = v_.on_gpu();
    return inputs;
  }

  void poison_page(std::size_t page) {
    for (const TensorView& view : {cache_->key_storage(0), cache_->value_storage(0)}) {
      const std::size_t bytes = static_cast<std::size_t>(view.strides[0]) * 2;
      testkit::fill_device(kGpu, static_cast<std::byte*>(view.data) + page * bytes, std::byte{0xFF},
                           bytes);
    }
  }

  /// The step's outputs by a backend, whose new tokens are there already.
  std::vector<float> attend(Backend backend, Stream stream = {}) {
    Attention(attention(backend), cache_->config())
        .attend(*plan_, *cache_, 0, inputs(), out_.gpu->view(), nullptr, stream);
    return outputs();
  }

  std::vector<float> outputs() {
    testkit::synchronize(kGpu);
    testkit::HostTensor host(DType::F16, {kTokens, kQueryHeads, kDim});
    out_.gpu->download(host);
    std::vector<float> values;
    for (std::int64_t i = 0; i < plan_->num_tokens() * kQueryHeads * kDim; ++i) {
      values.push_back(static_cast<float>(host.get(i)));
    }
    return values;
  }

  void append() {
    Attention(attention(Backend::Unfused), cache_->config()).append(*plan_, *cache_, 0, inputs());
  }

  static void expect_near(const std::vector<float>& got, const std::vector<float>& wanted) {
    ASSERT_EQ(got.size(), wanted.size());
    float worst = 0.0F;
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got[i])) << "element " << i;
      worst = std::max(worst, std::abs(got[i] - wanted[i]));
    }
    EXPECT_LT(worst, 4e-3F);  // four ulps of F16 above 1
  }

  std::optional<KvCache> cache_;
  std::optional<StepPlan> plan_;
  TwinTensor q_{DType::F16, {kTokens, kQueryHeads, kDim}, 3};
  TwinTensor k_{DType::F16, {kTokens, kHeads, kDim}, 4};
  TwinTensor v_{DType::F16, {kTokens, kHeads, kDim}, 5};
  TwinTensor out_{DType::F16, {kTokens, kQueryHeads, kDim}, 6};
};

TEST_F(GpuFusedRows, InOrderBehindOthersAreFound) {
  begin({{2, 40}, {3, 50}, {4, 30}});
  append();
  const std::vector<float> wanted = attend(Backend::Unfused);
  poison_page(0);
  poison_page(4);
  expect_near(attend(Backend::Fused), wanted);
}

TEST_F(GpuFusedRows, OfOneLengthInOrderAreFound) {
  begin({{5, 128}});
  append();
  const std::vector<float> wanted = attend(Backend::Unfused);
  for (const std::size_t page : {0U, 1U, 2U, 3U}) poison_page(page);
  expect_near(attend(Backend::Fused), wanted);
}

TEST_F(GpuFusedRows, OutOfOrderAreFound) {
  begin({{4, 30}, {2, 40}, {3, 50}});
  append();
  const std::vector<float> wanted = attend(Backend::Unfused);
  poison_page(0);
  poison_page(4);
  expect_near(attend(Backend::Fused), wanted);
}

// A caller's own capture, behind an eager call that went without a table.
TEST_F(GpuFusedRows, ACapturedCallFindsThemWhereverTheyLie) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  begin({{2, 40}, {3, 40}, {4, 40}});
  append();
  static_cast<void>(attend(Backend::Fused));
  const Attention fused(attention(Backend::Fused), cache_->config());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_NO_THROW(fused.attend(*plan_, *cache_, 0, inputs(), out_.gpu->view(), nullptr, {stream}));
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&run, graph, 0), cudaSuccess);
  begin({{4, 40}, {1, 40}, {3, 40}});
  append();
  const std::vector<float> wanted = attend(Backend::Unfused);
  testkit::fill_device(kGpu, out_.gpu->view().data, std::byte{0xFF},
                       static_cast<std::size_t>(kTokens) * kQueryHeads * kDim * 2);
  testkit::synchronize(kGpu);
  ASSERT_EQ(cudaGraphLaunch(run, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  expect_near(outputs(), wanted);
  ASSERT_EQ(cudaGraphExecDestroy(run), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

}  // namespace
}  // namespace octavo::gpu_tests
