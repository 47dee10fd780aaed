// SPDX-License-Identifier: Apache-2.0
// Cold L2: each launch takes the next of several caches. Launches are captured in a CUDA graph; the
// time is the median over replays, for one launch.
#include "kernels_cudnn/gpu/fused_bench.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cudnn/fused.h"
#include "kernels/cudnn/library.h"
#include "kernels_cudnn/gpu/device_problem.h"

#ifndef OCTAVO_COMMIT
#define OCTAVO_COMMIT "unknown"
#endif

namespace octavo::test {
namespace {

using kernels::fused::CallOptions;
using kernels::fused::FusedAttention;
using kernels::fused::FusedOptions;
using kernels::fused::Maxima;

constexpr std::int64_t kColdBytes = 300'000'000;

struct Shape {
  std::int32_t num_seqs, q_len, kv_len, num_q_heads, num_kv_heads, dim;
  std::int32_t page_size;  ///< 0: contiguous; -1: contiguous, any row for a sequence
  bool causal = true;
  TensorFormat format = TensorFormat::Thd;
  bool lse = false;
  std::int32_t tokens_as_rows = kernels::fused::kMaxTokensAsRows;

  [[nodiscard]] bool prefill() const { return q_len == kv_len; }
  [[nodiscard]] std::string name() const {
    const std::string cache = page_size > 0    ? fmt::format("page{}", page_size)
                              : page_size == 0 ? "contiguous"
                                               : "contiguous-rows";
    std::string text = fmt::format("{} b{} s{} h{}/{} d{} bf16", prefill() ? "prefill" : "decode",
                                   num_seqs, kv_len, num_q_heads, num_kv_heads, dim);
    if (prefill()) text += causal ? " causal" : " full";
    text += " " + cache;
    if (!prefill()) text += fmt::format(" q{}", q_len);
    if (format != TensorFormat::Thd) text += fmt::format(" {}", to_string(format));
    if (lse) text += " lse";
    if (tokens_as_rows != kernels::fused::kMaxTokensAsRows)
      text += fmt::format(" rows{}", tokens_as_rows);
    return text;
  }
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const auto& [b, s] : {std::pair{64, 8192}, {1, 1024}, {1, 32768}, {16, 8192}, {128, 2048}}) {
    for (const std::int32_t page : {16, 0, -1, 64, 1, 256})
      all.push_back({b, 1, s, 32, 8, 128, page});
  }
  all.push_back({64, 1, 8192, 32, 8, 128, 0, true, TensorFormat::Bshd});
  all.push_back({64, 1, 8192, 32, 8, 128, 16, true, TensorFormat::Bshd});
  all.push_back({64, 1, 8192, 32, 8, 128, 16, true, TensorFormat::Thd, true});
  all.push_back({64, 1, 8192, 32, 8, 128, 24});
  for (const std::int32_t q_len : {2, 4}) {
    for (const std::int32_t rows : {1, kernels::fused::kMaxTokensAsRows}) {
      all.push_back({64, q_len, 8192, 32, 8, 128, 16, true, TensorFormat::Thd, false, rows});
      all.push_back({1, q_len, 32768, 32, 8, 128, 16, true, TensorFormat::Thd, false, rows});
    }
  }
  for (const bool causal : {true, false}) {
    for (const std::int32_t page : {64, 0, 16, 1}) {
      all.push_back({2, 8192, 8192, 32, 32, 128, page, causal});
    }
  }
  for (const TensorFormat format : {TensorFormat::Bshd, TensorFormat::Sbhd}) {
    all.push_back({2, 8192, 8192, 32, 32, 128, 0, true, format});
    all.push_back({2, 8192, 8192, 32, 32, 128, 64, true, format});
  }
  for (const bool causal : {true, false}) {
    all.push_back({8, 2048, 2048, 32, 32, 64, 0, causal});
    all.push_back({2, 8192, 8192, 32, 32, 64, 0, causal});
    all.push_back({8, 2048, 2048, 32, 32, 128, 0, causal});
    all.push_back({8, 2048, 2048, 16, 16, 256, 0, causal});
    all.push_back({2, 8192, 8192, 16, 16, 256, 0, causal});
  }
  return all;
}

/// 16-bit normal numbers, by copying one stretch of them over the whole.
void fill_random(const DeviceArray& array) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> stretch(std::min<std::size_t>(array.size() / 2, 1U << 20U));
  for (auto& bits : stretch) {
    const float value = normal(random);
    std::uint32_t word = 0;
    static_assert(sizeof word == sizeof value);
    std::copy_n(reinterpret_cast<const char*>(&value), 4, reinterpret_cast<char*>(&word));
    bits = static_cast<std::uint16_t>(word >> 16U);
  }
  for (std::size_t at = 0; at < array.size(); at += stretch.size() * 2) {
    cuda_check(cudaMemcpy(array.as<char>() + at, stretch.data(),
                          std::min(stretch.size() * 2, array.size() - at), cudaMemcpyHostToDevice),
               "fill");
  }
}

/// Microseconds of one launch; `launch` gets its number.
double timed(cudaStream_t stream, int num_launches, const std::function<void(int)>& launch) {
  for (int i = 0; i < 3; ++i) launch(i);
  cuda_check(cudaStreamSynchronize(stream), "warm up");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < num_launches; ++i) launch(i);
  cuda_check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  cuda_check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;
  cuda_check(cudaEventCreate(&start), "cudaEventCreate");
  cuda_check(cudaEventCreate(&stop), "cudaEventCreate");
  std::vector<float> times;
  for (int replay = 0; replay < 8; ++replay) {
    cuda_check(cudaEventRecord(start, stream), "cudaEventRecord");
    cuda_check(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    cuda_check(cudaEventRecord(stop, stream), "cudaEventRecord");
    cuda_check(cudaEventSynchronize(stop), "cudaEventSynchronize");
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, start, stop), "cudaEventElapsedTime");
    if (replay > 0) times.push_back(ms);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::nth_element(times.begin(), times.begin() + 3, times.end());
  return static_cast<double>(times[3]) * 1e3 / num_launches;
}

void bench_shape(FusedAttention& attention, cudaStream_t stream, const Shape& shape,
                 const std::string& stamp) {
  const std::int64_t row = std::int64_t{shape.num_kv_heads} * shape.dim;
  const std::int64_t kv_bytes = 2 * 2 * shape.num_seqs * std::int64_t{shape.kv_len} * row;
  const auto copies = static_cast<int>(
      shape.prefill() ? 1 : std::clamp<std::int64_t>(kColdBytes / kv_bytes + 1, 1, 20));
  const std::int32_t page = shape.page_size > 0 ? shape.page_size : shape.kv_len;
  const std::int64_t num_pages = std::int64_t{shape.num_seqs} * ((shape.kv_len + page - 1) / page);
  std::vector<DeviceArray> keys;
  std::vector<DeviceArray> values;
  for (int i = 0; i < copies; ++i) {
    for (auto* side : {&keys, &values}) {
      side->emplace_back(static_cast<std::size_t>(num_pages * page * row * 2));
      fill_random(side->back());
    }
  }
  std::vector<std::int32_t> table(static_cast<std::size_t>(num_pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(3));
  const DeviceArray table_array = on_device(table);
  std::vector<std::int32_t> rows(static_cast<std::size_t>(shape.num_seqs));
  std::iota(rows.rbegin(), rows.rend(), 0);
  const DeviceArray rows_array = on_device(rows);
  std::vector<std::int32_t> offsets;
  for (std::int32_t b = 0; b <= shape.num_seqs; ++b) offsets.push_back(b * shape.q_len);
  const DeviceArray offsets_array = on_device(offsets);
  const DeviceArray lens_array =
      on_device(std::vector<std::int32_t>(static_cast<std::size_t>(shape.num_seqs), shape.kv_len));
  const std::int64_t num_tokens = std::int64_t{shape.num_seqs} * shape.q_len;
  const std::int64_t q_row = std::int64_t{shape.num_q_heads} * shape.dim;
  const DeviceArray q(static_cast<std::size_t>(num_tokens * q_row * 2));
  const DeviceArray out(q.size());
  const DeviceArray lse(static_cast<std::size_t>(num_tokens * shape.num_q_heads * 4));
  fill_random(q);

  kernels::AttendParams params;
  params.batch.num_seqs = shape.num_seqs;
  params.batch.num_tokens = static_cast<std::int32_t>(num_tokens);
  params.batch.token_offsets = offsets_array.as<std::int32_t>();
  params.batch.kv_lens = lens_array.as<std::int32_t>();
  if (shape.page_size != 0) params.batch.rows = rows_array.as<std::int32_t>();
  if (shape.page_size > 0) params.batch.page_table = table_array.as<std::int32_t>();
  params.batch.page_table_stride = num_pages / shape.num_seqs;
  params.kv.dtype = params.q_dtype = params.out_dtype = DType::BF16;
  params.kv.num_pages = num_pages;
  params.kv.page_size = page;
  kernels::TokenLayout layout;
  layout.ragged = shape.format == TensorFormat::Thd;
  const bool sbhd = shape.format == TensorFormat::Sbhd;
  layout.token_stride = sbhd ? shape.num_seqs * q_row : q_row;
  layout.batch_stride = sbhd ? q_row : shape.q_len * q_row;
  layout.head_stride = shape.dim;
  layout.num_batch_rows = shape.num_seqs;
  layout.num_token_rows = layout.ragged ? num_tokens : shape.q_len;
  params.q_layout = params.out_layout = layout;
  params.q = q.as<void>();
  params.out = out.as<void>();
  if (shape.lse) params.lse = lse.as<float>();
  params.lse_token_stride = shape.num_q_heads;
  params.num_lse_rows = num_tokens;
  params.num_q_heads = shape.num_q_heads;
  params.num_kv_heads = shape.num_kv_heads;
  params.head_dim = params.head_dim_v = shape.dim;
  params.scale = 1.0F / std::sqrt(static_cast<float>(shape.dim));
  params.causal = shape.causal;
  const auto layer = [&](int i) {
    const auto at = static_cast<std::size_t>(i % copies);
    kernels::PagedTensor tensor;
    tensor.page_stride = page * row;
    tensor.slot_stride = row;
    tensor.head_stride = shape.dim;
    params.kv.k = params.kv.v = tensor;
    params.kv.k.data = keys[at].as<void>();
    params.kv.v.data = values[at].as<void>();
  };
  layer(0);
  const Maxima maxima{
      shape.num_seqs, params.batch.num_tokens, shape.q_len, shape.kv_len, true, true};
  const auto start = std::chrono::steady_clock::now();
  const std::size_t bytes = attention.workspace_bytes(params, maxima);
  const double build_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  const DeviceArray workspace(bytes);
  CallOptions options;
  const int launches = shape.prefill() ? 4 : 20;
  // As a model runs it: the step is prepared once, by its first layer.
  const double us = timed(stream, launches, [&](int i) {
    layer(i);
    options.new_step = i == 0;
    attention.attend(params, maxima, options, workspace.as<void>(), bytes, stream);
  });
  constexpr int kCalls = 20;
  const auto first_call = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) {
    layer(i);
    attention.attend(params, maxima, options, workspace.as<void>(), bytes, stream);
  }
  const double host_us =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - first_call)
          .count() /
      kCalls;
  cuda_check(cudaStreamSynchronize(stream), "calls");
  std::string rate;
  if (shape.prefill()) {
    const double flops = 4.0 * shape.num_seqs * shape.num_q_heads * shape.kv_len * shape.kv_len *
                         shape.dim / (shape.causal ? 2 : 1);
    rate = fmt::format(R"("tflops": {:.1f})", flops / us / 1e6);
  } else {
    rate = fmt::format(R"("tbps": {:.3f})", static_cast<double>(kv_bytes) / us / 1e6);
  }
  fmt::print(
      R"({{"case": "{}", "backend": "fused", "time_us": {:.2f}, {}, "host_us": {:.1f}, "workspace": {}, "build_ms": {:.0f}, {}}})"
      "\n",
      shape.name(), us, rate, host_us, bytes, build_ms, stamp);
  std::fflush(stdout);
}

}  // namespace

void bench_fused(std::int32_t arch, const std::string& device, double seconds,
                 const std::string& only, bool deterministic) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int driver = 0;
  cuda_check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  const std::string stamp =
      fmt::format(R"("device": "{}", "driver_api": {}, "cudnn": "{}", "commit": "{}")", device,
                  driver, kernels::fused::library().version_text, OCTAVO_COMMIT);
  cudaStream_t stream = nullptr;
  cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  FusedAttention attention(arch, FusedOptions{.deterministic = deterministic});
  FusedAttention few_rows(arch,
                          FusedOptions{.max_tokens_as_rows = 1, .deterministic = deterministic});
  for (const Shape& shape : shapes()) {
    if (shape.name().find(only) == std::string::npos) continue;
    if (std::chrono::steady_clock::now() > deadline) break;
    try {
      bench_shape(shape.tokens_as_rows == 1 ? few_rows : attention, stream, shape, stamp);
    } catch (const std::exception& error) {
      std::string text = error.what();
      std::replace(text.begin(), text.end(), '"', '\'');
      std::replace(text.begin(), text.end(), '\n', ' ');
      fmt::print(R"({{"case": "{}", "backend": "fused", "refused": "{}"}})"
                 "\n",
                 shape.name(), text);
    }
  }
  cudaStreamDestroy(stream);
}

}  // namespace octavo::test
