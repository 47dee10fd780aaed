// SPDX-License-Identifier: Apache-2.0
// first_step.cpp on a GPU: cache and tensors in its memory, all work on one stream. Generation runs
// from a graph that is captured once. Ends with 77 where there is no GPU.
#include <cuda_runtime_api.h>
#include <octavo/octavo.h>

#include <cstdio>
#include <vector>

namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  throw octavo::Error(octavo::ErrorCode::DeviceFailure, cudaGetErrorString(error));
}

/// Floats in the GPU's memory, all of one value.
class GpuFloats {
 public:
  GpuFloats(std::size_t count, float value) {
    const std::vector<float> host(count, value);
    check(cudaMalloc(&data_, count * sizeof(float)));
    check(cudaMemcpy(data_, host.data(), count * sizeof(float), cudaMemcpyHostToDevice));
  }
  ~GpuFloats() { static_cast<void>(cudaFree(data_)); }
  GpuFloats(const GpuFloats&) = delete;
  GpuFloats& operator=(const GpuFloats&) = delete;

  [[nodiscard]] void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

int run() {
  using namespace octavo;
  const Device gpu{DeviceType::Cuda, 0};
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));

  // One layer, 8 query heads over 2 KV heads, 64 slots in pages of 16.
  CacheConfig cache_config;
  cache_config.num_kv_heads = 2;
  cache_config.head_dim = 64;
  cache_config.max_num_seqs = 2;
  cache_config.max_seq_len = 64;
  cache_config.page_size = 16;
  cache_config.num_pages = 4;
  cache_config.device = gpu;
  KvCache cache(cache_config);

  AttentionConfig attention_config;
  attention_config.num_q_heads = 8;
  attention_config.num_kv_heads = 2;
  attention_config.head_dim = 64;
  const Attention attention(attention_config, cache_config);

  // Room for the longest step. A model would write q, k and v here for each layer.
  constexpr int kMostTokens = 25;
  const GpuFloats q(std::size_t{kMostTokens} * 8 * 64, 0.5F);
  const GpuFloats k(std::size_t{kMostTokens} * 2 * 64, 0.25F);
  const GpuFloats v(std::size_t{kMostTokens} * 2 * 64, 1.0F);
  const GpuFloats out(std::size_t{kMostTokens} * 8 * 64, 0.0F);
  LayerTensors layer;  // packed tokens: [num_tokens, heads, dim]
  layer.inputs.q = TensorView(q.data(), DType::F32, {kMostTokens, 8, 64}, gpu);
  layer.inputs.k = TensorView(k.data(), DType::F32, {kMostTokens, 2, 64}, gpu);
  layer.inputs.v = TensorView(v.data(), DType::F32, {kMostTokens, 2, 64}, gpu);
  layer.out = TensorView(out.data(), DType::F32, {kMostTokens, 8, 64}, gpu);

  // One new token for each of two sequences, whatever their lengths and pages.
  const StepMaxima decode{.num_seqs = 2, .num_tokens = 2, .max_new_tokens = 1, .max_kv_len = 64};
  GraphedStep graph(attention, cache, decode, {&layer, 1});

  for (int step = 0; step < 4; ++step) {
    // Sequences 7 and 3: prompts of 20 and 5 tokens at first, then one new token each.
    const StepPlan plan = cache.plan({{7, step == 0 ? 20 : 1}, {3, step == 0 ? 5 : 1}}).plan();
    cache.begin(plan, {stream});
    if (step == 0) {
      attention.forward(plan, cache, /*layer=*/0, layer.inputs, layer.out, nullptr, {stream});
    } else {
      graph.replay(plan, {stream});
    }
    float first = 0.0F;
    check(cudaMemcpyAsync(&first, out.data(), sizeof(first), cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    std::printf("step %d: %d new tokens, sequence 7 holds %d, out[0] = %g\n", step,
                plan.num_tokens(), static_cast<int>(cache.length(7)), static_cast<double>(first));
  }
  check(cudaStreamDestroy(stream));
  return 0;
}

}  // namespace

int main() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::printf("there is no GPU here\n");
    return 77;
  }
  try {
    return run();
  } catch (const octavo::Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
