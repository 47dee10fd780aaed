// SPDX-License-Identifier: Apache-2.0
// What the GPU's benchmarks share: the clock, the lines they print, numbers to run on. Device times
// are medians, of CUDA graph replays where a case says so.
#pragma once

#include "bench/commit.h"
#include "testing/device_memory.h"

#include <octavo/attention.h>
#include <octavo/cache.h>
#include <octavo/error.h>

#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

namespace octavo::bench {

using testkit::DeviceMemory;

inline constexpr Device kGpu{DeviceType::Cuda, 0};
inline constexpr int kMostRepeats = 21;
inline constexpr int kFewestRepeats = 7;

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw Error(ErrorCode::DeviceFailure, fmt::format("{}: {}", what, cudaGetErrorString(error)));
  }
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class GpuClock {
 public:
  GpuClock() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }

  [[nodiscard]] Stream stream() const { return {stream_}; }

  /// Microseconds of one of `count` calls of `enqueue`.
  double in_stream(int count, const std::function<void(int)>& enqueue) {
    return median_of(count, [&] {
      for (int j = 0; j < count; ++j) enqueue(j);
    });
  }

  /// The same, captured together in a graph.
  double in_graph(int count, const std::function<void(int)>& enqueue) {
    enqueue(0);  // prepares what is prepared once
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < count; ++i) enqueue(i);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t run = nullptr;
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&run, graph, 0), "cudaGraphInstantiate");
    const double us =
        median_of(count, [&] { check(cudaGraphLaunch(run, stream_), "cudaGraphLaunch"); });
    check(cudaGraphExecDestroy(run), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return us;
  }

 private:
  /// Long runs lower the GPU's clock, so what takes long is repeated less; as often as other
  /// libraries are that results are laid beside.
  double median_of(int count, const std::function<void()>& enqueue) {
    constexpr double kLong = 2000.0;  // of one repeat
    std::vector<double> times;
    int repeats = kMostRepeats;
    for (int i = 0; i < repeats + 2; ++i) {
      check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
      enqueue();
      const double us = elapsed();
      if (i > 0 && us > kLong) repeats = kFewestRepeats;
      if (i >= 2) times.push_back(us / count);
    }
    return median(times);
  }

  double elapsed() {
    check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float ms = 0.0F;
    check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(ms) * 1000.0;
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

inline std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts = {};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

struct Report {
  std::string device;
  std::string driver;
  double copy_tbps = 0.0;
  std::string date = today();
  std::string only;  ///< Part of the names of the cases to run.

  [[nodiscard]] bool wants(const std::string& name) const {
    return name.find(only) != std::string::npos;
  }

  void line(const std::string& name, const char* backend, double us, double bytes,
            double flops) const {
    const double tbps = bytes / us * 1e-6;
    fmt::print(
        "{{\"case\": \"{}\", \"backend\": \"{}\", \"device\": \"{}\", \"driver\": \"{}\", "
        "\"commit\": \"{}\", \"date\": \"{}\", \"time_us\": {:.2f}, \"tflops\": {:.1f}, \"tbps\": "
        "{:.3f}, "
        "\"bound_share\": {:.3f}}}\n",
        name, backend, device, driver, kCommit, date, us, flops / us * 1e-6, tbps,
        copy_tbps > 0.0 ? tbps / copy_tbps : 0.0);
  }
};

inline CacheConfig append_cache(std::int32_t max_num_seqs, std::int64_t max_seq_len) {
  CacheConfig c;
  c.num_layers = 16;
  c.num_kv_heads = 8;
  c.head_dim = 128;
  c.dtype = DType::BF16;
  c.max_num_seqs = max_num_seqs;
  c.max_seq_len = max_seq_len;
  c.page_size = 16;
  c.device = kGpu;
  return c;
}

inline AttentionConfig heads(std::int32_t num_q_heads) {
  AttentionConfig a;
  a.num_q_heads = num_q_heads;
  a.num_kv_heads = 8;
  a.head_dim = 128;
  a.backend = Backend::Unfused;
  return a;
}

/// New tokens of every layer, random bytes that are finite numbers.
inline DeviceMemory numbers(std::int64_t count) {
  std::vector<std::uint16_t> host(static_cast<std::size_t>(count));
  std::uint32_t state = 1;
  for (std::uint16_t& bits : host) {
    state = state * 1664525U + 1013904223U;
    bits = static_cast<std::uint16_t>(0x3F00U | ((state >> 16U) & 0x80FFU));
  }
  DeviceMemory memory(kGpu, host.size() * 2);
  memory.upload(host.data(), memory.size());
  return memory;
}

/// Attention alone: of prompts, of decodes, of a prompt beside decodes.
void bench_prefills(GpuClock& clock, const Report& report, Backend backend);
void bench_decodes(GpuClock& clock, const Report& report, Backend backend);
void bench_mixed(GpuClock& clock, const Report& report, Backend backend);

/// A prompt by unfused, beside what it cannot do without: the products, and one read and one write
/// of the scores.
void bench_unfused(GpuClock& clock, const Report& report);
/// Microseconds of the products alone, for every pair of tokens.
double bare_products(GpuClock& clock, std::int32_t num_q_heads, std::int32_t num_kv_heads,
                     std::int64_t dim, std::int64_t tokens);

/// Whole steps: the plan of a caller's cache, and layers run one by one or replayed as a graph.
void bench_steps(GpuClock& clock, const Report& report);

}  // namespace octavo::bench
