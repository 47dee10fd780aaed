// SPDX-License-Identifier: Apache-2.0
// A host ahead of the GPU: steps keep their order and their integers, and begin waits only when its
// ring is full. Appends whose launches overlap keep their order too.
#include "tests/gpu/cuda_calls.h"
#include "tests/gpu/twins.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace octavo::gpu_tests {
namespace {

constexpr std::int32_t kHeads = 8;
constexpr std::int32_t kDim = 64;

CacheConfig config_of(std::int32_t max_num_seqs, std::int64_t max_seq_len) {
  CacheConfig c;
  c.num_kv_heads = kHeads;
  c.head_dim = kDim;
  c.dtype = DType::F16;
  c.max_num_seqs = max_num_seqs;
  c.max_seq_len = max_seq_len;
  c.page_size = 4;
  return c;
}

AttentionConfig attention() {
  AttentionConfig a;
  a.num_q_heads = a.num_kv_heads = kHeads;
  a.head_dim = kDim;
  return a;
}

LayerInputs inputs_of(const ConstTensorView& k, const ConstTensorView& v, const Rope* rope) {
  LayerInputs inputs;
  inputs.k = k;
  inputs.v = v;
  inputs.rope = rope;
  return inputs;
}

/// Holds the work that is enqueued on a stream behind it until it is opened, at most for `longest`.
class Gate {
 public:
  Gate(cudaStream_t stream, std::chrono::milliseconds longest) : longest_(longest) {
    EXPECT_EQ(cudaLaunchHostFunc(stream, hold, this), cudaSuccess);
  }
  void open() { open_ = true; }

 private:
  static void hold(void* gate) {
    const auto& self = *static_cast<const Gate*>(gate);
    const auto end = std::chrono::steady_clock::now() + self.longest_;
    while (!self.open_ && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  std::chrono::milliseconds longest_;
  std::atomic<bool> open_{false};
};

class GpuOrder : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream_ == nullptr) return;
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  }
  void synchronize() const { ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

  cudaStream_t stream_ = nullptr;
};

TEST_F(GpuOrder, StepsBeyondTheRingWaitAndArriveWhole) {
  constexpr int kSteps = 40;
  constexpr std::int64_t kTokens = 6;
  Twins twins(config_of(12, 500));
  twins.poison();
  std::vector<TwinTensor> tensors;
  tensors.reserve(kSteps);
  for (int i = 0; i < kSteps; ++i) {
    tensors.emplace_back(DType::F16, std::vector<std::int64_t>{kTokens, kHeads, kDim},
                         static_cast<std::uint64_t>(i));
  }
  const Attention on_host(attention(), twins.host.config());
  const Attention on_gpu(attention(), twins.gpu.config());
  testkit::synchronize(kGpu);
  Gate gate(stream_, std::chrono::milliseconds(200));
  const CudaCalls before = cuda_calls();
  for (int i = 0; i < kSteps; ++i) {
    const auto [host_plan, gpu_plan] =
        twins.step({{1, 1}, {2, 3}, {static_cast<SequenceId>(3 + i % 5), 2}}, {stream_});
    const TwinTensor& x = tensors[static_cast<std::size_t>(i)];
    on_host.append(host_plan, twins.host, 0, inputs_of(x.on_host(), x.on_host(), nullptr));
    on_gpu.append(gpu_plan, twins.gpu, 0, inputs_of(x.on_gpu(), x.on_gpu(), nullptr), {stream_});
  }
  EXPECT_GT(cuda_calls().waits, before.waits);
  synchronize();
  EXPECT_TRUE(twins.same_storage());
}

TEST_F(GpuOrder, AHostEightStepsAheadWaitsForNothing) {
  CacheConfig config = config_of(2, 500);
  config.device = kGpu;
  KvCache cache(config);
  for (int round = 0; round < 16; ++round) {
    cache.begin(cache.plan({{1, 1}}).plan(), {stream_});  // the ring is met at another place
    synchronize();
    Gate gate(stream_, std::chrono::seconds(2));
    const CudaCalls before = cuda_calls();
    for (int i = 0; i < 8; ++i) cache.begin(cache.plan({{1, 1}, {2, 1}}).plan(), {stream_});
    EXPECT_EQ(cuda_calls().waits, before.waits) << "round " << round;
    gate.open();
    synchronize();
  }
}

TEST_F(GpuOrder, OfSixteenStepsTwoAskForAnEvent) {
  CacheConfig config = config_of(2, 500);
  config.device = kGpu;
  KvCache cache(config);
  for (int i = 0; i < 5; ++i) cache.begin(cache.plan({{1, 1}}).plan(), {stream_});
  const CudaCalls before = cuda_calls();
  for (int i = 0; i < 16; ++i) {
    cache.begin(cache.plan({{1, 1}, {2, 2}}).plan(), {stream_});
    synchronize();
  }
  EXPECT_EQ(cuda_calls().events, before.events + 4);
}

TEST_F(GpuOrder, ACacheMayGoWhileItsStepsAreStillToCome) {
  CacheConfig config = config_of(2, 500);
  config.device = kGpu;
  std::optional<KvCache> cache(config);
  const Gate gate(stream_, std::chrono::milliseconds(50));
  for (int i = 0; i < 3; ++i) cache->begin(cache->plan({{1, 7}, {2, 1}}).plan(), {stream_});
  cache.reset();
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
}

/// Two appends to the same slots, a slow one with RoPE before a fast one without.
void append_twice(const Attention& attention, const StepPlan& plan, KvCache& cache,
                  const ConstTensorView& first, const ConstTensorView& last, const Rope& rope,
                  Stream stream) {
  attention.append(plan, cache, 0, inputs_of(first, first, &rope), stream);
  attention.append(plan, cache, 0, inputs_of(last, last, nullptr), stream);
}

struct OverlapCase {
  std::int64_t tokens = 0;
  bool captured = false;
};

class GpuOverlap : public GpuOrder, public ::testing::WithParamInterface<OverlapCase> {};

TEST_P(GpuOverlap, OfAppendsLeavesTheLastOnesTokens) {
  const auto [tokens, captured] = GetParam();
  Twins twins(config_of(1, tokens));
  twins.poison();
  const std::vector<std::int64_t> shape = {tokens, kHeads, kDim};
  const TwinTensor first(DType::F16, shape, 1);
  const TwinTensor last(DType::F16, shape, 2);
  const testkit::DeviceTensor changing(kGpu, first.host);
  const Rope rope;
  const auto [host_plan, gpu_plan] = twins.step({{1, tokens}}, {stream_});
  const Attention on_host(attention(), twins.host.config());
  const Attention on_gpu(attention(), twins.gpu.config());
  append_twice(on_host, host_plan, twins.host, first.on_host(), last.on_host(), rope, {});
  // The last append's tokens are themselves the result of work just ahead of it.
  const auto enqueue = [&] {
    const std::size_t bytes = static_cast<std::size_t>(tokens) * kHeads * kDim * 2;
    for (int i = 0; i < 8; ++i) {
      ASSERT_EQ(cudaMemcpyAsync(changing.view().data, first.on_gpu().data, bytes,
                                cudaMemcpyDeviceToDevice, stream_),
                cudaSuccess);
      append_twice(on_gpu, gpu_plan, twins.gpu, last.on_gpu(), changing.view(), rope, {stream_});
      ASSERT_EQ(cudaMemcpyAsync(changing.view().data, last.on_gpu().data, bytes,
                                cudaMemcpyDeviceToDevice, stream_),
                cudaSuccess);
      append_twice(on_gpu, gpu_plan, twins.gpu, first.on_gpu(), changing.view(), rope, {stream_});
    }
  };
  if (captured) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t run = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    enqueue();
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&run, graph, 0), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(run, stream_), cudaSuccess);
    synchronize();
    ASSERT_EQ(cudaGraphExecDestroy(run), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  } else {
    enqueue();
    synchronize();
  }
  EXPECT_TRUE(twins.same_storage());
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuOverlap,
                         ::testing::Values(OverlapCase{8'192, false}, OverlapCase{8'192, true},
                                           OverlapCase{64, false}, OverlapCase{64, true}),
                         [](const auto& tested) {
                           return std::to_string(tested.param.tokens) +
                                  (tested.param.captured ? "_captured" : "_eager");
                         });

}  // namespace
}  // namespace octavo::gpu_tests
