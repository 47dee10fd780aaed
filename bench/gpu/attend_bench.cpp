// SPDX-License-Identifier: Apache-2.0
// Attention of prompts, of decodes and of both together. Cases and their names are those that other
// libraries are timed by, so that results can be laid side by side. Keys are random; the pages of a
// sequence lie scattered over the pool; layers are rotated, so that nothing is found in the L2.
#include "bench/gpu/harness.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace octavo::bench {
namespace {

struct Heads {
  std::int32_t q = 32;
  std::int32_t kv = 8;
  std::int32_t dim = 128;
  std::int32_t dim_v = 0;  ///< 0: dim.

  [[nodiscard]] std::int32_t of_v() const { return dim_v == 0 ? dim : dim_v; }
  /// Of K and V together.
  [[nodiscard]] double dims() const { return static_cast<double>(dim) + of_v(); }
  [[nodiscard]] std::string dims_name() const {
    return dim_v == 0 ? fmt::format("d{}", dim) : fmt::format("d{}/{}", dim, dim_v);
  }
};

constexpr int kMostLayers = 20;
constexpr double kBeyondL2 = 300e6;

/// Random numbers all over a layer, from one block of them.
void fill(const TensorView& view, const DeviceMemory& random) {
  std::int64_t left = 2;
  for (std::size_t axis = 0; axis < 4; ++axis) left *= view.shape[axis];
  auto* to = static_cast<std::byte*>(view.data);
  while (left > 0) {
    const auto part = std::min(static_cast<std::size_t>(left), random.size());
    check(cudaMemcpy(to, random.data(), part, cudaMemcpyDeviceToDevice), "cudaMemcpy");
    to += part;
    left -= static_cast<std::int64_t>(part);
  }
}

/// A cache whose sequences have lengths of their own, and a step on top of them.
class FilledCache {
 public:
  /// page_size 0: contiguous.
  FilledCache(const Heads& heads, std::int32_t page_size, const std::vector<SequenceStep>& past,
              const std::vector<SequenceStep>& step, Stream stream,
              std::int64_t workspace_bytes = std::int64_t{1} << 30U)
      : config_(config(heads, page_size, past, step, workspace_bytes)), cache_(config_) {
    const DeviceMemory random = numbers(std::int64_t{16} << 20U);
    for (std::int32_t layer = 0; layer < config_.num_layers; ++layer) {
      fill(cache_.key_storage(layer), random);
      fill(cache_.value_storage(layer), random);
    }
    grow(past, stream);
    plan_ = std::make_unique<StepPlan>(cache_.plan(step).plan());
    cache_.begin(*plan_, stream);
  }

  [[nodiscard]] const CacheConfig& config() const { return config_; }
  [[nodiscard]] KvCache& cache() { return cache_; }
  [[nodiscard]] const StepPlan& plan() const { return *plan_; }

 private:
  static CacheConfig config(const Heads& heads, std::int32_t page_size,
                            const std::vector<SequenceStep>& past,
                            const std::vector<SequenceStep>& step, std::int64_t workspace_bytes) {
    std::int64_t longest = 0;
    double bytes = 0.0;
    for (std::size_t i = 0; i < past.size(); ++i) {
      const std::int64_t len = past[i].new_tokens + step[i].new_tokens;
      longest = std::max(longest, len);
      bytes += 2.0 * static_cast<double>(len) * heads.kv * heads.dims();
    }
    CacheConfig c = append_cache(static_cast<std::int32_t>(past.size()), longest);
    c.num_layers = std::clamp(static_cast<int>(std::ceil(kBeyondL2 / bytes)), 1, kMostLayers);
    c.num_kv_heads = heads.kv;
    c.head_dim = heads.dim;
    c.head_dim_v = heads.dim_v;
    c.workspace_bytes = workspace_bytes;
    if (page_size == 0) {
      c.kind = CacheKind::Contiguous;
    } else {
      c.page_size = page_size;
    }
    return c;
  }

  /// A page for each sequence in turns, so that those of one lie apart.
  void grow(const std::vector<SequenceStep>& past, Stream stream) {
    const std::int64_t chunk =
        config_.kind == CacheKind::Contiguous ? config_.max_seq_len : config_.page_size;
    std::vector<SequenceStep> left = past;
    std::vector<SequenceStep> part;
    do {
      part.clear();
      for (SequenceStep& line : left) {
        const std::int64_t tokens = std::min(chunk, line.new_tokens);
        line.new_tokens -= tokens;
        if (tokens > 0) part.push_back({line.id, tokens});
      }
      if (!part.empty()) cache_.begin(cache_.plan(part).plan(), stream);
    } while (!part.empty());
  }

  CacheConfig config_;
  KvCache cache_;
  std::unique_ptr<StepPlan> plan_;
};

enum class Calls { Captured, Eager };

/// Microseconds of a layer's attention.
double time_attention(GpuClock& clock, FilledCache& filled, const Heads& heads, Mask mask,
                      Backend backend, int launches, Calls calls = Calls::Captured) {
  const std::int64_t tokens = filled.plan().num_tokens();
  const DeviceMemory q = numbers(tokens * heads.q * heads.dim);
  const DeviceMemory out(kGpu, static_cast<std::size_t>(tokens * heads.q * heads.of_v() * 2));
  AttentionConfig a;
  a.num_q_heads = heads.q;
  a.num_kv_heads = heads.kv;
  a.head_dim = heads.dim;
  a.head_dim_v = heads.dim_v;
  a.mask = mask;
  a.backend = backend;
  const Attention attention(a, filled.config());
  LayerInputs inputs;
  inputs.q = ConstTensorView(q.data(), DType::BF16, {tokens, heads.q, heads.dim}, kGpu);
  const TensorView to(out.data(), DType::BF16, {tokens, heads.q, heads.of_v()}, kGpu);
  const auto enqueue = [&](int i) {
    attention.attend(filled.plan(), filled.cache(), i % filled.config().num_layers, inputs, to,
                     nullptr, clock.stream());
  };
  return calls == Calls::Captured ? clock.in_graph(launches, enqueue)
                                  : clock.in_stream(launches, enqueue);
}

std::vector<SequenceStep> sequences(std::int32_t count, std::int64_t tokens) {
  std::vector<SequenceStep> lines;
  for (SequenceId id = 0; id < count; ++id) lines.push_back({id, tokens});
  return lines;
}

std::string kind_name(std::int32_t page_size) {
  return page_size == 0 ? "contiguous" : fmt::format("page{}", page_size);
}

}  // namespace

void bench_prefills(GpuClock& clock, const Report& report, Backend backend) {
  constexpr int kLaunches = 4;
  const struct {
    std::int32_t dim, len, batch, heads, kv_heads;
  } cases[] = {{64, 2048, 8, 32, 32},  {64, 8192, 2, 32, 32}, {128, 2048, 8, 32, 32},
               {128, 8192, 2, 32, 32}, {128, 8192, 2, 32, 8}, {128, 16384, 1, 32, 32},
               {256, 2048, 8, 16, 16}, {256, 8192, 2, 16, 16}};
  for (const auto& c : cases) {
    const Heads heads{c.heads, c.kv_heads, c.dim};
    for (const std::int32_t page_size : {0, 16}) {
      for (const Mask mask : {Mask::Full, Mask::Causal}) {
        const std::string name =
            fmt::format("prefill b{} s{} h{}/{} d{} bf16 {} {}", c.batch, c.len, c.heads,
                        c.kv_heads, c.dim, to_string(mask), kind_name(page_size));
        const std::string eager_name = name + ", eager";
        // Captured calls are for any order of the sequences in the cache, eager ones for theirs.
        const bool wants_eager =
            backend == Backend::Fused && page_size == 0 && report.wants(eager_name);
        if (!report.wants(name) && !wants_eager) continue;
        FilledCache filled(heads, page_size, sequences(c.batch, 0), sequences(c.batch, c.len),
                           clock.stream());
        const double all = 4.0 * c.batch * c.heads * c.dim * std::pow(c.len, 2.0);
        const double products = mask == Mask::Causal ? all / 2.0 : all;
        if (report.wants(name)) {
          report.line(name, to_string(backend),
                      time_attention(clock, filled, heads, mask, backend, kLaunches), 0.0,
                      products);
        }
        if (wants_eager) {
          report.line(eager_name, to_string(backend),
                      time_attention(clock, filled, heads, mask, backend, kLaunches, Calls::Eager),
                      0.0, products);
        }
      }
    }
  }
}

void bench_decodes(GpuClock& clock, const Report& report, Backend backend) {
  constexpr int kLaunches = 20;
  const struct {
    std::int32_t batch;
    std::int64_t len;
    Heads heads;
  } cases[] = {{1, 1024, {32, 8, 128}},        {1, 32768, {32, 8, 128}},
               {16, 8192, {32, 8, 128}},       {64, 8192, {32, 8, 128}},
               {128, 2048, {32, 8, 128}},      {64, 4096, {32, 32, 128}},
               {64, 8192, {64, 8, 128}},       {64, 8192, {16, 2, 64}},
               {32, 8192, {16, 2, 256}},       {64, 4096, {16, 1, 576, 512}},
               {64, 4096, {128, 1, 576, 512}}, {1, 32768, {128, 1, 576, 512}}};
  const struct {
    std::int32_t page_size, new_tokens;
  } kinds[] = {{1, 1}, {16, 1}, {16, 4}, {64, 1}, {0, 1}};
  for (const auto& c : cases) {
    for (const auto& kind : kinds) {
      const std::string name =
          fmt::format("decode b{} s{} h{}/{} {} bf16 {} q{}", c.batch, c.len, c.heads.q, c.heads.kv,
                      c.heads.dims_name(), kind_name(kind.page_size), kind.new_tokens);
      if (!report.wants(name)) continue;
      FilledCache filled(c.heads, kind.page_size, sequences(c.batch, c.len - kind.new_tokens),
                         sequences(c.batch, kind.new_tokens), clock.stream());
      const double us = time_attention(clock, filled, c.heads, Mask::Causal, backend, kLaunches);
      const double keys = static_cast<double>(c.batch * c.len) * c.heads.dims();
      report.line(name, to_string(backend), us, 2.0 * keys * c.heads.kv,
                  2.0 * keys * c.heads.q * kind.new_tokens);
    }
  }
}

void bench_unfused(GpuClock& clock, const Report& report) {
  constexpr std::int64_t kLen = 8192;
  constexpr std::int64_t kMiB = std::int64_t{1} << 20U;
  const Heads heads;
  const double pairs = static_cast<double>(kLen) * kLen * heads.q;
  const double flops = pairs * heads.dim * 4.0;
  const std::string shape = "prefill b1 s8192 h32/8 d128 bf16";
  const std::string bare = shape + " full, bare products";
  if (report.wants(bare)) {
    const double products = bare_products(clock, heads.q, heads.kv, heads.dim, kLen);
    // F32 scores are read, BF16 weights written.
    const double moved = pairs * 6.0 / report.copy_tbps * 1e-6;
    report.line(bare, "cublaslt", products, 0.0, flops);
    report.line(bare + " and scores", "bound", products + moved, 0.0, flops);
  }
  for (const Mask mask : {Mask::Full, Mask::Causal}) {
    for (const std::int64_t workspace :
         {128 * kMiB, 256 * kMiB, 288 * kMiB, 512 * kMiB, 1024 * kMiB}) {
      const std::string name =
          fmt::format("{} {} page16, workspace {} MiB", shape, to_string(mask), workspace / kMiB);
      if (!report.wants(name)) continue;
      FilledCache filled(heads, 16, sequences(1, 0), sequences(1, kLen), clock.stream(), workspace);
      const double us = time_attention(clock, filled, heads, mask, Backend::Unfused, 1);
      report.line(name, "unfused", us, 0.0, mask == Mask::Causal ? flops / 2.0 : flops);
    }
  }
}

void bench_mixed(GpuClock& clock, const Report& report, Backend backend) {
  constexpr std::int32_t kDecodes = 63;
  constexpr std::int64_t kLen = 4096;
  const Heads heads;
  const auto run = [&](const char* name, bool prompt, bool decodes) {
    std::vector<SequenceStep> past, step;
    if (prompt) {
      past.push_back({0, 0});
      step.push_back({0, kLen});
    }
    for (SequenceId id = 1; decodes && id <= kDecodes; ++id) {
      past.push_back({id, kLen - 1});
      step.push_back({id, 1});
    }
    FilledCache filled(heads, 16, past, step, clock.stream());
    report.line(name, to_string(backend),
                time_attention(clock, filled, heads, Mask::Causal, backend, 4), 0.0, 0.0);
  };
  run("mixed 1x4096 prompt, 63 decodes s4096 h32/8 d128 bf16 page16", true, true);
  run("mixed, the prompt alone", true, false);
  run("mixed, the decodes alone", false, true);
}

}  // namespace octavo::bench
