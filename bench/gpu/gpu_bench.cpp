// SPDX-License-Identifier: Apache-2.0
// Times of the GPU's append, of prefill and decode by its own kernels, and of the host's plan and
// begin, each beside the device-to-device copy of the same run. Device times are medians of CUDA
// graph replays that rotate over the layers of a cache larger than the L2. Prints one JSON object a
// line.
#include "bench/gpu/harness.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

namespace octavo::bench {
namespace {

double copy_bandwidth(GpuClock& clock) {
  constexpr std::size_t kBytes = std::size_t{2} << 30U;
  const DeviceMemory from(kGpu, kBytes);
  const DeviceMemory to(kGpu, kBytes);
  const double us = clock.in_stream(4, [&](int) {
    check(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice,
                          clock.stream().handle),
          "cudaMemcpyAsync");
  });
  return 2.0 * static_cast<double>(kBytes) / us * 1e-6;
}

void bench_append(GpuClock& clock, const Report& report, std::int32_t seqs, std::int64_t tokens,
                  std::int64_t past, bool with_rope) {
  const CacheConfig config = append_cache(seqs, past + 2 * tokens);
  KvCache cache(config);
  std::vector<SequenceStep> step;
  for (SequenceId id = 0; id < seqs; ++id) step.push_back({id, past});
  if (past > 0) cache.begin(cache.plan(step).plan(), clock.stream());
  for (SequenceStep& line : step) line.new_tokens = tokens;
  const StepPlan plan = cache.plan(step).plan();
  cache.begin(plan, clock.stream());
  const std::int64_t all = seqs * tokens;
  const std::int64_t per_layer = all * 8 * 128;
  const DeviceMemory k = numbers(config.num_layers * per_layer);
  const DeviceMemory v = numbers(config.num_layers * per_layer);
  const Attention attention(heads(8), config);
  const Rope rope;
  const double us = clock.in_graph(config.num_layers * 4, [&](int i) {
    const std::int32_t layer = i % config.num_layers;
    LayerInputs inputs;
    inputs.k = ConstTensorView(k.data() + layer * per_layer * 2, DType::BF16, {all, 8, 128}, kGpu);
    inputs.v = ConstTensorView(v.data() + layer * per_layer * 2, DType::BF16, {all, 8, 128}, kGpu);
    inputs.rope = with_rope ? &rope : nullptr;
    attention.append(plan, cache, layer, inputs, clock.stream());
  });
  report.line(
      fmt::format("append b{} t{} h8 d128 bf16 page16{}", seqs, tokens, with_rope ? " rope" : ""),
      "append", us, static_cast<double>(per_layer) * 2.0 * 2.0 * 2.0, 0.0);
}

void bench_prefill(GpuClock& clock, const Report& report, Backend backend, Mask mask) {
  constexpr std::int64_t kTokens = 8192;
  CacheConfig config = append_cache(1, kTokens);
  config.num_layers = 1;
  config.num_kv_heads = 8;
  config.workspace_bytes = std::int64_t{4} << 30U;
  KvCache cache(config);
  const StepPlan plan = cache.plan({{1, kTokens}}).plan();
  cache.begin(plan, clock.stream());
  const DeviceMemory q = numbers(kTokens * 32 * 128);
  const DeviceMemory out(kGpu, q.size());
  AttentionConfig a = heads(32);
  a.mask = mask;
  a.backend = backend;
  const Attention attention(a, config);
  LayerInputs inputs;
  inputs.q = ConstTensorView(q.data(), DType::BF16, {kTokens, 32, 128}, kGpu);
  inputs.k = ConstTensorView(q.data(), DType::BF16, {kTokens, 8, 128}, kGpu);
  inputs.v = inputs.k;
  attention.append(plan, cache, 0, inputs, clock.stream());
  const TensorView to(out.data(), DType::BF16, {kTokens, 32, 128}, kGpu);
  const double us = clock.in_graph(
      1, [&](int) { attention.attend(plan, cache, 0, inputs, to, nullptr, clock.stream()); });
  const double products = 4.0 * kTokens * kTokens * 32.0 * 128.0;
  report.line(fmt::format("prefill b1 s8192 h32/8 d128 bf16 page16 {}", to_string(mask)),
              to_string(backend), us, 0.0, mask == Mask::Causal ? products / 2.0 : products);
}

/// `tokens` new ones for each of `seqs` sequences of kv_len keys.
void bench_decode(GpuClock& clock, const Report& report, Backend backend, std::int32_t seqs,
                  std::int64_t kv_len, std::int32_t page_size, std::int64_t tokens) {
  constexpr double kBeyondL2 = 256e6;
  constexpr int kMostLayers = 64;
  const double bytes = 2.0 * static_cast<double>(seqs * kv_len) * 8.0 * 128.0 * 2.0;
  CacheConfig config = append_cache(seqs, kv_len);
  config.num_layers = std::clamp(static_cast<int>(kBeyondL2 / bytes), 1, kMostLayers);
  config.page_size = page_size;
  KvCache cache(config);
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    for (const TensorView& view : {cache.key_storage(layer), cache.value_storage(layer)}) {
      std::int64_t elements = 1;
      for (std::size_t axis = 0; axis < 4; ++axis) elements *= view.shape[axis];
      // Any keys will do, as long as they are numbers.
      testkit::fill_device(kGpu, view.data, std::byte{0x3C},
                           static_cast<std::size_t>(elements) * 2);
    }
  }
  std::vector<SequenceStep> lines;
  for (SequenceId id = 0; id < seqs; ++id) lines.push_back({id, kv_len - tokens});
  cache.begin(cache.plan(lines).plan(), clock.stream());
  for (SequenceStep& line : lines) line.new_tokens = tokens;
  const StepPlan plan = cache.plan(lines).plan();
  cache.begin(plan, clock.stream());
  const std::int64_t all = seqs * tokens;
  const DeviceMemory q = numbers(all * 32 * 128);
  const DeviceMemory out(kGpu, q.size());
  AttentionConfig a = heads(32);
  a.backend = backend;
  const Attention attention(a, config);
  LayerInputs inputs;
  inputs.q = ConstTensorView(q.data(), DType::BF16, {all, 32, 128}, kGpu);
  const TensorView to(out.data(), DType::BF16, {all, 32, 128}, kGpu);
  const double us = clock.in_graph(config.num_layers, [&](int i) {
    attention.attend(plan, cache, i, inputs, to, nullptr, clock.stream());
  });
  report.line(
      fmt::format("decode b{} s{} q{} h32/8 d128 bf16 page{}", seqs, kv_len, tokens, page_size),
      to_string(backend), us, bytes, 0.0);
}

/// The cases of the goals.
void bench_decodes(GpuClock& clock, const Report& report, Backend backend) {
  bench_decode(clock, report, backend, 1, 1024, 16, 1);
  bench_decode(clock, report, backend, 1, 32768, 16, 1);
  bench_decode(clock, report, backend, 16, 8192, 16, 1);
  bench_decode(clock, report, backend, 64, 8192, 1, 1);
  bench_decode(clock, report, backend, 64, 8192, 16, 1);
  bench_decode(clock, report, backend, 64, 8192, 64, 1);
  bench_decode(clock, report, backend, 64, 8192, 16, 4);
  bench_decode(clock, report, backend, 128, 2048, 16, 1);
}

void bench_host(GpuClock& clock, const Report& report) {
  CacheConfig config = append_cache(256, 4096 + 200);
  config.num_layers = 1;
  config.num_kv_heads = 1;
  config.head_dim = 8;
  KvCache cache(config);
  std::vector<SequenceStep> step;
  for (SequenceId id = 0; id < 256; ++id) step.push_back({id, 4096});
  cache.begin(cache.plan(step).plan(), clock.stream());
  for (SequenceStep& line : step) line.new_tokens = 1;
  // Means of as many steps as it takes until what is not done in every step comes round again.
  constexpr int kRound = 16;
  std::vector<double> times;
  for (int i = 0; i < 12; ++i) {
    std::chrono::duration<double, std::micro> round{};
    for (int j = 0; j < kRound; ++j) {
      check(cudaStreamSynchronize(clock.stream().handle), "cudaStreamSynchronize");
      const auto begin = std::chrono::steady_clock::now();
      cache.begin(cache.plan(step).plan(), clock.stream());
      round += std::chrono::steady_clock::now() - begin;
    }
    times.push_back(round.count() / kRound);
  }
  report.line("plan and begin b256 s4096 page16, host", "host", median(times), 0.0, 0.0);
}

/// `part`: append, prefill, decode, host, steps, or empty for all.
int run(const std::string& part) {
  const std::string trouble = testkit::device_trouble(kGpu);
  if (!trouble.empty()) {
    fmt::print(stderr, "gpu_bench: {}\n", trouble);
    return 3;
  }
  cudaDeviceProp properties;
  int driver = 0;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  GpuClock clock;
  Report report{properties.name, fmt::format("{}.{}", driver / 1000, driver % 1000 / 10)};
  report.copy_tbps = copy_bandwidth(clock);
  fmt::print("{{\"case\": \"copy\", \"device\": \"{}\", \"tbps\": {:.3f}}}\n", report.device,
             report.copy_tbps);
  if (part.empty() || part == "append") {
    bench_append(clock, report, 1, 8192, 0, false);
    bench_append(clock, report, 1, 8192, 0, true);
    bench_append(clock, report, 8, 1024, 40, false);
    bench_append(clock, report, 64, 1, 1000, false);
    bench_append(clock, report, 64, 1, 1000, true);
    bench_append(clock, report, 256, 1, 1000, false);
  }
  if (part.empty() || part == "prefill") {
    for (const Backend backend : {Backend::Unfused, Backend::Flash2}) {
      bench_prefill(clock, report, backend, Mask::Full);
      bench_prefill(clock, report, backend, Mask::Causal);
    }
  }
  if (part.empty() || part == "decode") bench_decodes(clock, report, Backend::Flash2);
  if (part.empty() || part == "host") bench_host(clock, report);
  if (part.empty() || part == "steps") bench_steps(clock, report);
  return 0;
}

}  // namespace
}  // namespace octavo::bench

int main(int argc, char** argv) {
  try {
    return octavo::bench::run(argc > 1 ? argv[1] : "");
  } catch (const octavo::Error& error) {
    fmt::print(stderr, "gpu_bench: {}\n", error.what());
    return 1;
  }
}
