// SPDX-License-Identifier: Apache-2.0
// The planning kernel over a caller's arrays, and decode steps of several layers: eager, and
// replayed by GraphedStep.
#include "bench/gpu/harness.h"

#include <octavo/backend.h>
#include <octavo/graphed_step.h>
#include <octavo/workspace.h>

#include <chrono>
#include <numeric>
#include <string>
#include <vector>

namespace octavo::bench {
namespace {

DeviceMemory ints(const std::vector<std::int32_t>& values) {
  DeviceMemory memory(kGpu, values.size() * sizeof(std::int32_t));
  memory.upload(values.data(), memory.size());
  return memory;
}
const std::int32_t* get(const DeviceMemory& memory) {
  return reinterpret_cast<const std::int32_t*>(memory.data());
}

void bench_plan(GpuClock& clock, const Report& report, std::int32_t seqs, std::int32_t kv_len,
                std::int32_t page_size) {
  const std::int32_t width = kv_len / page_size + 1;
  std::vector<std::int32_t> offsets(static_cast<std::size_t>(seqs) + 1);
  std::iota(offsets.begin(), offsets.end(), 0);
  std::vector<std::int32_t> table(static_cast<std::size_t>(seqs) * static_cast<std::size_t>(width));
  std::iota(table.begin(), table.end(), 0);
  const DeviceMemory gpu_offsets = ints(offsets);
  const DeviceMemory gpu_lens =
      ints(std::vector<std::int32_t>(static_cast<std::size_t>(seqs), kv_len));
  const DeviceMemory gpu_table = ints(table);
  const DeviceMemory pool(kGpu, 256);
  KvView view;
  // The plan looks at no key: one slot's memory stands for all.
  view.k = TensorView(pool.data(), DType::BF16, {seqs * width, page_size, 1, 8}, kGpu);
  view.v = view.k;
  view.page_table = get(gpu_table);
  view.page_table_stride = width;
  view.num_rows = seqs;
  view.max_pages_per_seq = width;
  Workspace workspace(kGpu);
  const DeviceMemory memory(kGpu, std::size_t{1} << 20U);
  workspace.use(memory.data(), static_cast<std::int64_t>(memory.size()));
  StepArrays step;
  step.num_seqs = step.num_tokens = seqs;
  step.token_offsets = get(gpu_offsets);
  step.kv_lens = get(gpu_lens);
  step.max_new_tokens = 1;
  step.workspace = &workspace;
  const double us = clock.in_graph(64, [&](int) { workspace.plan(view, step, clock.stream()); });
  workspace.check(clock.stream());
  report.line(fmt::format("plan of a caller's cache b{} s{} page{}", seqs, kv_len, page_size),
              "plan", us, 0.0, 0.0);
}

/// Microseconds of the host for one call, the device idle before each.
double host_time(const GpuClock& clock, const std::function<void()>& call) {
  std::vector<double> times;
  for (int i = 0; i < kMostRepeats; ++i) {
    check(cudaStreamSynchronize(clock.stream().handle), "cudaStreamSynchronize");
    const auto begin = std::chrono::steady_clock::now();
    call();
    const auto end = std::chrono::steady_clock::now();
    times.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
  }
  return median(times);
}

void bench_decode(GpuClock& clock, const Report& report, Backend backend, std::int32_t seqs,
                  std::int64_t past) {
  CacheConfig config = append_cache(seqs, past + 16);
  KvCache cache(config);
  std::vector<SequenceStep> lines;
  for (SequenceId id = 0; id < seqs; ++id) lines.push_back({id, past});
  cache.begin(cache.plan(lines).plan(), clock.stream());
  for (SequenceStep& line : lines) line.new_tokens = 1;
  const StepPlan plan = cache.plan(lines).plan();
  cache.begin(plan, clock.stream());
  const DeviceMemory q = numbers(std::int64_t{seqs} * 32 * 128);
  const DeviceMemory out(kGpu, q.size());
  AttentionConfig a = heads(32);
  a.backend = backend;
  const Attention attention(a, config);
  LayerTensors layer;
  layer.inputs.q = ConstTensorView(q.data(), DType::BF16, {seqs, 32, 128}, kGpu);
  layer.inputs.k = ConstTensorView(q.data(), DType::BF16, {seqs, 8, 128}, kGpu);
  layer.inputs.v = layer.inputs.k;
  layer.out = TensorView(out.data(), DType::BF16, {seqs, 32, 128}, kGpu);
  const StepMaxima maxima{.num_seqs = seqs,
                          .num_tokens = seqs,
                          .max_new_tokens = 1,
                          .max_kv_len = static_cast<std::int32_t>(past) + 16};
  GraphedStep graph(attention, cache, maxima,
                    std::vector(static_cast<std::size_t>(config.num_layers), layer));
  const auto eager = [&] {
    for (std::int32_t i = 0; i < config.num_layers; ++i)
      attention.forward(plan, cache, i, layer.inputs, layer.out, nullptr, clock.stream());
  };
  const auto replay = [&] { graph.replay(plan, clock.stream()); };
  const std::string name = fmt::format("step b{} s{} q1 h32/8 d128 bf16 page16, {} layers", seqs,
                                       past, config.num_layers);
  const double eager_us = clock.in_stream(1, [&](int) { eager(); });
  const double replay_us = clock.in_stream(1, [&](int) { replay(); });
  report.line(name + ", eager", to_string(backend), eager_us, 0.0, 0.0);
  report.line(name + ", replayed", to_string(backend), replay_us, 0.0, 0.0);
  report.line(name + ", eager, host", to_string(backend), host_time(clock, eager), 0.0, 0.0);
  report.line(name + ", replayed, host", to_string(backend), host_time(clock, replay), 0.0, 0.0);
}

bool has_fused() {
  for (const BackendInfo& info : backends()) {
    if (info.backend == Backend::Fused) return info.usable;
  }
  return false;
}

}  // namespace

void bench_steps(GpuClock& clock, const Report& report) {
  bench_plan(clock, report, 1, 4096, 16);
  bench_plan(clock, report, 256, 4096, 16);
  bench_plan(clock, report, 256, 4096, 1);
  bench_plan(clock, report, 10'000, 128, 16);
  for (const Backend backend : {Backend::Unfused, Backend::Flash2, Backend::Fused}) {
    if (backend == Backend::Fused && !has_fused()) continue;
    bench_decode(clock, report, backend, 4, 1000);
    bench_decode(clock, report, backend, 64, 1000);
  }
}

}  // namespace octavo::bench
