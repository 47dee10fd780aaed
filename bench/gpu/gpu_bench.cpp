// SPDX-License-Identifier: Apache-2.0
// Times of the GPU's append and attention, and of the host's plan and begin, each beside the
// device-to-device copy of the same run. Device times are medians of CUDA graph replays that rotate
// over the layers of a cache larger than the L2. Prints one JSON object a line.
#include "bench/gpu/harness.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <string>
#include <string_view>
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

void print_help() {
  fmt::print(R"(octavo_gpu_bench [PART [BACKEND [NAME]]]

Times of the GPU's append and attention, and of the host's plan and begin; one JSON object a line.

  PART     append, prefill, decode, mixed, unfused, host or steps; all where it is left out or ''
  BACKEND  of the attention of prefill, decode and mixed (flash2)
  NAME     a part of the names of the cases to run, of prefill, decode and unfused

Exit status: 0 done, 1 a call failed, 2 wrong arguments, 3 no GPU.

  octavo_gpu_bench prefill fused "s8192 h32/32 d128 bf16 full contiguous"
)");
}

/// What print_help says of its arguments.
int run(const std::string& part, Backend backend, const std::string& only) {
  constexpr std::string_view kParts[] = {"",      "append",  "prefill", "decode",
                                         "mixed", "unfused", "host",    "steps"};
  if (std::find(std::begin(kParts), std::end(kParts), part) == std::end(kParts)) {
    fmt::print(stderr,
               "gpu_bench: wanted append, prefill, decode, mixed, unfused, host or steps, got "
               "'{}'\n",
               part);
    return 2;
  }
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
  report.only = only;
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
  if (part.empty() || part == "prefill") bench_prefills(clock, report, backend);
  if (part.empty() || part == "decode") bench_decodes(clock, report, backend);
  if (part.empty() || part == "mixed") bench_mixed(clock, report, backend);
  if (part.empty() || part == "unfused") bench_unfused(clock, report);
  if (part.empty() || part == "host") bench_host(clock, report);
  if (part.empty() || part == "steps") bench_steps(clock, report);
  return 0;
}

}  // namespace
}  // namespace octavo::bench

int main(int argc, char** argv) {
  try {
    if (argc > 1 && (argv[1] == std::string_view("--help") || argv[1] == std::string_view("-h"))) {
      octavo::bench::print_help();
      return 0;
    }
    if (argc > 4) {
      fmt::print(stderr, "gpu_bench: wanted at most 3 arguments, got {} (see --help)\n", argc - 1);
      return 2;
    }
    const auto backend = octavo::parse_backend(argc > 2 ? argv[2] : "flash2");
    if (!backend.has_value()) {
      fmt::print(stderr, "gpu_bench: wanted a backend's name, got '{}'\n", argv[2]);
      return 2;
    }
    return octavo::bench::run(argc > 1 ? argv[1] : "", *backend, argc > 3 ? argv[3] : "");
  } catch (const octavo::Error& error) {
    fmt::print(stderr, "gpu_bench: {}\n", error.what());
    return 1;
  }
}
