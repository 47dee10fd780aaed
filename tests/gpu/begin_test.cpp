// SPDX-License-Identifier: Apache-2.0
// begin on the GPU: long page tables, page copies in their order, stream capture.
#include "dispatch/cuda/copy_groups.h"
#include "tests/gpu/twins.h"

#include <cuda_runtime_api.h>

namespace octavo::gpu_tests {
namespace {

constexpr std::int32_t kHeads = 2;
constexpr std::int32_t kDim = 8;

CacheConfig config_of(CacheKind kind, std::int32_t page_size, std::int64_t max_seq_len,
                      std::int64_t num_pages, std::int32_t num_layers = 1) {
  CacheConfig c;
  c.kind = kind;
  c.num_layers = num_layers;
  c.num_kv_heads = kHeads;
  c.head_dim = kDim;
  c.dtype = DType::F16;
  c.max_num_seqs = 12;
  c.max_seq_len = max_seq_len;
  c.page_size = page_size;
  c.num_pages = num_pages;
  return c;
}

AttentionConfig attention() {
  AttentionConfig a;
  a.num_q_heads = a.num_kv_heads = kHeads;
  a.head_dim = kDim;
  return a;
}

void append(Twins& twins, const std::vector<SequenceStep>& lines, std::uint64_t seed) {
  const auto [host_plan, gpu_plan] = twins.step(lines);
  for (std::int32_t layer = 0; layer < twins.host.config().num_layers; ++layer) {
    const TwinTensor k(DType::F16, {host_plan.num_tokens(), kHeads, kDim}, seed);
    const TwinTensor v(DType::F16, {host_plan.num_tokens(), kHeads, kDim}, seed + 1);
    LayerInputs inputs;
    inputs.k = k.on_host();
    inputs.v = v.on_host();
    Attention(attention(), twins.host.config()).append(host_plan, twins.host, layer, inputs);
    inputs.k = k.on_gpu();
    inputs.v = v.on_gpu();
    Attention(attention(), twins.gpu.config()).append(gpu_plan, twins.gpu, layer, inputs);
    testkit::synchronize(kGpu);
  }
}

TEST_F(GpuTest, ATableOfMoreEntriesThanAnUploadArrives) {
  Twins twins(config_of(CacheKind::Paged, 1, 100'000, 200'000));
  twins.poison();
  append(twins, {{1, 3}, {2, 90'000}, {3, 70'000}, {4, 1}}, 1);
  append(twins, {{3, 2}, {2, 1}, {4, 100}}, 2);
  EXPECT_TRUE(twins.same_storage());
}

TEST_F(GpuTest, ForksShareAndCopyAsOnTheCpu) {
  Twins twins(config_of(CacheKind::Paged, 16, 200, 200, 3));
  twins.poison();
  append(twins, {{1, 21}, {2, 40}}, 1);
  for (KvCache* cache : {&twins.host, &twins.gpu}) {
    for (SequenceId id = 3; id < 8; ++id) static_cast<void>(cache->fork(id % 2 + 1, id));
  }
  append(twins, {{7, 1}, {3, 2}, {1, 1}, {4, 30}, {5, 1}, {6, 1}, {2, 1}}, 2);
  EXPECT_TRUE(twins.same_storage());
}

// A fork of a fork copies rows that an earlier copy of the same list writes.
TEST_F(GpuTest, ChainsOfContiguousForksCopyInOrder) {
  Twins twins(config_of(CacheKind::Contiguous, 16, 200, 0, 2));
  twins.poison();
  append(twins, {{1, 77}, {2, 5}}, 1);
  for (KvCache* cache : {&twins.host, &twins.gpu}) {
    static_cast<void>(cache->fork(1, 3));
    static_cast<void>(cache->fork(3, 4));
    static_cast<void>(cache->fork(4, 5));
    static_cast<void>(cache->fork(2, 6));
  }
  append(twins, {{5, 3}, {4, 1}, {6, 1}}, 2);
  EXPECT_TRUE(twins.same_storage());
}

// Capture forbids allocation and synchronisation; the graph then appends other steps of the shape.
TEST_F(GpuTest, ACapturedAppendReplaysWithOtherLengthsAndPages) {
  Twins twins(config_of(CacheKind::Paged, 4, 100, 300));
  twins.poison();
  append(twins, {{1, 5}, {2, 9}, {3, 2}}, 1);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  const TwinTensor k(DType::F16, {3, kHeads, kDim}, 11);
  const TwinTensor v(DType::F16, {3, kHeads, kDim}, 12);
  cudaGraphExec_t graph = nullptr;
  const std::vector<std::vector<SequenceStep>> steps = {
      {{1, 1}, {2, 1}, {3, 1}}, {{3, 1}, {1, 1}, {2, 1}}, {{2, 1}, {7, 1}, {1, 1}}};
  for (const auto& lines : steps) {
    const auto [host_plan, gpu_plan] = twins.step(lines, {stream});
    LayerInputs inputs;
    inputs.k = k.on_host();
    inputs.v = v.on_host();
    Attention(attention(), twins.host.config()).append(host_plan, twins.host, 0, inputs);
    if (graph == nullptr) {
      inputs.k = k.on_gpu();
      inputs.v = v.on_gpu();
      const Attention on_gpu(attention(), twins.gpu.config());
      ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      EXPECT_NO_THROW(on_gpu.append(gpu_plan, twins.gpu, 0, inputs, {stream}));
      cudaGraph_t captured = nullptr;
      ASSERT_EQ(cudaStreamEndCapture(stream, &captured), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&graph, captured, 0), cudaSuccess);
      ASSERT_EQ(cudaGraphDestroy(captured), cudaSuccess);
    }
    ASSERT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
  }
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_TRUE(twins.same_storage());
  ASSERT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// A layer call enqueues and does nothing else: capture would refuse allocations and waits.
TEST_F(GpuTest, ACapturedForwardGivesTheBitsOfAnEagerOne) {
  CacheConfig config = config_of(CacheKind::Paged, 4, 100, 300);
  config.device = kGpu;
  KvCache cache(config);
  const StepPlan plan = cache.plan({{1, 5}, {2, 9}, {3, 20}}).plan();
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  cache.begin(plan, {stream});
  const TwinTensor q(DType::F16, {34, kHeads, kDim}, 1);
  TwinTensor eager(DType::F16, {34, kHeads, kDim}, 2);
  TwinTensor replayed(DType::F16, {34, kHeads, kDim}, 3);
  LayerInputs inputs;
  inputs.q = inputs.k = inputs.v = q.on_gpu();
  const Attention on_gpu(attention(), config);
  on_gpu.forward(plan, cache, 0, inputs, eager.gpu->view(), nullptr, {stream});
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_NO_THROW(on_gpu.forward(plan, cache, 0, inputs, replayed.gpu->view(), nullptr, {stream}));
  ASSERT_EQ(cudaStreamEndCapture(stream, &captured), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&graph, captured, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  eager.gpu->download(eager.host);
  replayed.gpu->download(replayed.host);
  EXPECT_TRUE(eager.host == replayed.host);
  ASSERT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(captured), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST(CopyGroups, EndWhereACopyNeedsAnEarlierOne) {
  dispatch::CopyGroups groups(10);
  const std::vector<PageCopy> read_after_write = {{0, 1, 4}, {0, 2, 4}, {2, 3, 4}, {0, 4, 4}};
  EXPECT_EQ(groups.first_group(read_after_write), 2U);
  EXPECT_EQ(groups.first_group(std::span(read_after_write).subspan(2)), 2U);
  const std::vector<PageCopy> write_after_read = {{0, 1, 4}, {5, 0, 4}};
  EXPECT_EQ(groups.first_group(write_after_read), 1U);
  const std::vector<PageCopy> write_after_write = {{0, 1, 4}, {5, 1, 4}};
  EXPECT_EQ(groups.first_group(write_after_write), 1U);
}

}  // namespace
}  // namespace octavo::gpu_tests
