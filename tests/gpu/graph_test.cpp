// SPDX-License-Identifier: Apache-2.0
// Captured steps: one graph, many steps, each held to the oracle; what a replay refuses; a caller's
// own capture over both kinds of cache.
#include "testing/spec.h"
#include "tests/conformance/suite.h"
#include "tests/gpu/callers.h"
#include "tests/gpu/gpu_test.h"
#include "tests/gpu/twins.h"

#include <octavo/backend.h>
#include <octavo/error.h>
#include <octavo/graphed_step.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

namespace octavo::gpu_tests {
namespace {

using ::testing::HasSubstr;
using testkit::Case;
using testkit::CaseStep;
using testkit::Comparison;
using testkit::DeviceTensor;
using testkit::HostTensor;
using testkit::make_case;
using testkit::parse_spec;

std::string fused_trouble() {
  for (const BackendInfo& info : backends()) {
    if (info.backend == Backend::Fused) return info.usable ? "" : info.why_not;
  }
  return "there is no backend fused";
}

StepMaxima maxima_of(const Case& value, std::int32_t spare) {
  StepMaxima maxima{.num_seqs = value.cache.max_num_seqs,
                    .max_kv_len = static_cast<std::int32_t>(value.cache.max_seq_len)};
  for (const CaseStep& step : value.steps) {
    maxima.num_tokens =
        std::max(maxima.num_tokens, static_cast<std::int32_t>(total_new_tokens(step)));
    maxima.max_new_tokens =
        std::max(maxima.max_new_tokens, static_cast<std::int32_t>(longest_new_tokens(step)));
  }
  maxima.num_tokens += spare;
  return maxima;
}

/// Tensors at fixed addresses, as large as the maxima, through which a case's steps go.
class FixedTensors {
 public:
  FixedTensors(const Case& value, const StepMaxima& maxima) : case_(value), maxima_(maxima) {
    const AttentionConfig& a = value.attention;
    q_ = tensor(value.dtype, a.num_q_heads, a.head_dim);
    k_ = tensor(value.dtype, a.num_kv_heads, a.head_dim);
    v_ = tensor(value.dtype, a.num_kv_heads, a.head_dim_v);
    out_ = tensor(value.dtype, a.num_q_heads, a.head_dim_v);
    lse_ = HostTensor(DType::F32, {maxima.num_tokens, a.num_q_heads});
    gpu_.reserve(5);
    for (const HostTensor* host : {&q_, &k_, &v_, &out_, &lse_}) gpu_.emplace_back(kGpu, *host);
    if (value.sinks) sinks_.emplace(kGpu, *value.sinks);
  }

  [[nodiscard]] LayerTensors layer() const {
    LayerTensors layer;
    layer.inputs.q = gpu_[0].view();
    layer.inputs.k = gpu_[1].view();
    layer.inputs.v = gpu_[2].view();
    layer.inputs.format = case_.format;
    if (sinks_) layer.inputs.sinks = sinks_->floats();
    layer.out = gpu_[3].view();
    layer.lse = gpu_[4].view();
    return layer;
  }

  /// The step's tokens to the GPU, padding NaN; outputs are poisoned.
  void upload(const CaseStep& step) {
    copy(step, step.q, q_);
    copy(step, step.k, k_);
    copy(step, step.v, v_);
    out_ = tensor(case_.dtype, case_.attention.num_q_heads, case_.attention.head_dim_v);
    const HostTensor* hosts[] = {&q_, &k_, &v_, &out_, &lse_};
    for (std::size_t i = 0; i < 5; ++i) {
      testkit::synchronize(kGpu);
      gpu_memory_write(gpu_[i], *hosts[i]);
    }
  }

  /// Holds the results to the case's; rows beyond the step must be 0 and -inf.
  void compare(std::size_t step_idx, Comparison& total) {
    const CaseStep& step = case_.steps[step_idx];
    testkit::synchronize(kGpu);
    gpu_[3].download(out_);
    HostTensor lse(DType::F32, lse_.shape());
    gpu_[4].download(lse);
    EXPECT_TRUE(out_.guards_intact());
    EXPECT_TRUE(lse.guards_intact());
    HostTensor out(case_.dtype, step.out.shape());
    for (std::int64_t i = 0; i < out.size(); ++i) out.set(i, 0.0);  // padding of the step's shape
    HostTensor step_lse(DType::F32, step.lse->shape());
    std::vector<bool> seen(static_cast<std::size_t>(out_.size()), false);
    for_each_row(step, step.out.shape(), out_.shape(),
                 [&](std::int64_t in_step, std::int64_t fixed) {
                   const std::int64_t width = row_width(out_);
                   for (std::int64_t i = 0; i < width; ++i) {
                     out.set(in_step * width + i, out_.get(fixed * width + i));
                     seen[static_cast<std::size_t>(fixed * width + i)] = true;
                   }
                 });
    for (std::int64_t i = 0; i < out_.size(); ++i) {
      if (!seen[static_cast<std::size_t>(i)]) {
        ASSERT_EQ(out_.get(i), 0.0) << i;
      }
    }
    for (std::int64_t i = 0; i < lse.size(); ++i) {
      if (i < step_lse.size()) {
        step_lse.set(i, lse.get(i));
      } else {
        ASSERT_EQ(lse.get(i), -INFINITY) << i;
      }
    }
    compare_step(case_, static_cast<std::int64_t>(step_idx), out, step_lse, total);
  }

 private:
  [[nodiscard]] HostTensor tensor(DType dtype, std::int64_t heads, std::int64_t dim) const {
    switch (case_.format) {
      case TensorFormat::Thd:
        return {dtype, {maxima_.num_tokens, heads, dim}};
      case TensorFormat::Bshd:
        return {dtype, {maxima_.num_seqs, maxima_.max_new_tokens, heads, dim}};
      case TensorFormat::Sbhd:
        break;
    }
    return {dtype, {maxima_.max_new_tokens, maxima_.num_seqs, heads, dim}};
  }

  static std::int64_t row_width(const HostTensor& tensor) {
    const auto& shape = tensor.shape();
    return shape[shape.size() - 2] * shape.back();
  }

  void for_each_row(const CaseStep& step, const std::vector<std::int64_t>& from,
                    const std::vector<std::int64_t>& to,
                    const std::function<void(std::int64_t, std::int64_t)>& use) const {
    std::int64_t start = 0;
    for (std::size_t b = 0; b < step.sequences.size(); ++b) {
      const auto seq = static_cast<std::int64_t>(b);
      for (std::int64_t token = 0; token < step.sequences[b].new_tokens; ++token) {
        use(testkit::row_of(case_.format, from, seq, token, start),
            testkit::row_of(case_.format, to, seq, token, start));
      }
      start += step.sequences[b].new_tokens;
    }
  }

  void copy(const CaseStep& step, const HostTensor& from, HostTensor& to) const {
    to = HostTensor(to.dtype(), to.shape());  // NaN
    const std::int64_t bytes = row_width(to) * dtype_bytes(to.dtype());
    for_each_row(step, from.shape(), to.shape(), [&](std::int64_t in_step, std::int64_t fixed) {
      std::memcpy(to.data() + fixed * bytes, from.data() + in_step * bytes,
                  static_cast<std::size_t>(bytes));
    });
  }

  static void gpu_memory_write(const DeviceTensor& to, const HostTensor& from) {
    ASSERT_EQ(cudaMemcpy(to.view().data, from.data(), static_cast<std::size_t>(from.num_bytes()),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
  }

  const Case& case_;
  StepMaxima maxima_;
  HostTensor q_, k_, v_, out_, lse_;
  std::vector<DeviceTensor> gpu_;
  std::optional<DeviceTensor> sinks_;
};

CacheConfig gpu_config(const Case& value, std::int32_t num_layers) {
  CacheConfig config = value.cache;
  config.device = kGpu;
  config.num_layers = num_layers;
  if (config.num_pages == 0 && config.kind == CacheKind::Paged) {
    const std::int64_t pages = (config.max_seq_len + config.page_size - 1) / config.page_size + 1;
    config.num_pages = pages * config.max_num_seqs;
  }
  return config;
}

StepPlan begin_step(KvCache& cache, const CaseStep& step) {
  for (const SequenceId id : step.release) cache.release(id);
  for (const CaseStep::Fork& fork : step.fork) EXPECT_TRUE(cache.fork(fork.from, fork.to).ok());
  for (const CaseStep::Truncate& cut : step.truncate) cache.truncate(cut.id, cut.length);
  StepPlan plan = cache.plan(step.sequences).plan();
  cache.begin(plan);
  return plan;
}

/// One graph of two layers for all steps; both layers get the same tokens, so both must be right.
void expect_right(const std::string& line, Backend backend, CacheKind kind) {
  SCOPED_TRACE(line);
  Case value = make_case(parse_spec(line));
  value.cache.kind = kind;
  KvCache cache(gpu_config(value, 2));
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    for (const TensorView& view : {cache.key_storage(layer), cache.value_storage(layer)})
      testkit::fill_device(kGpu, view.data, std::byte{0xFF}, Twins::bytes_of(view));
  }
  AttentionConfig config = value.attention;
  config.backend = backend;
  const Attention attention(config, cache.config());
  const StepMaxima maxima = maxima_of(value, 3);
  FixedTensors first(value, maxima);
  FixedTensors second(value, maxima);
  GraphedStep graph(attention, cache, maxima, std::vector{first.layer(), second.layer()});
  EXPECT_EQ(graph.backend(), backend);
  Comparison total;
  for (std::size_t i = 0; i < value.steps.size(); ++i) {
    const StepPlan plan = begin_step(cache, value.steps[i]);
    first.upload(value.steps[i]);
    second.upload(value.steps[i]);
    graph.replay(plan);
    first.compare(i, total);
    second.compare(i, total);
  }
  EXPECT_TRUE(total.ok()) << total.worst.to_string();
}

class Graphed : public GpuTestWith<std::tuple<CacheKind, std::string>> {};

TEST_P(Graphed, ReplaysAWholeCaseByUnfused) {
  expect_right(std::get<1>(GetParam()), Backend::Unfused, std::get<0>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(
    Unfused, Graphed,
    ::testing::Combine(
        ::testing::Values(CacheKind::Paged, CacheKind::Contiguous),
        ::testing::Values("b4 q3 s30 steps24 hq4 hkv2 d16 p4 f32 life seed29",
                          "b4 q3 s30 steps24 hq3 hkv1 d16 p1 bf16 life sbhd seed30",
                          "b4 q9 s20 steps24 hq2 hkv2 d8 p7 f16 life bshd sinks w11,0 seed31",
                          "b40 q1 s9 steps3 hq2 hkv1 d16 p2 f32 seed10",
                          "b2 q64 s65 steps2 hq7 hkv1 d32 p3 bf16 sbhd seed6")));

class GraphedFused : public GpuTestWith<std::tuple<CacheKind, std::string>> {
 protected:
  void SetUp() override {
    GpuTestWith::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    const std::string trouble = fused_trouble();
    if (!trouble.empty()) GTEST_SKIP() << trouble;
  }
};

TEST_P(GraphedFused, ReplaysAWholeCaseByFused) {
  expect_right(std::get<1>(GetParam()), Backend::Fused, std::get<0>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(
    Fused, GraphedFused,
    ::testing::Combine(::testing::Values(CacheKind::Paged, CacheKind::Contiguous),
                       ::testing::Values("b4 q3 s30 steps12 hq4 hkv2 d64 p4 bf16 life seed121",
                                         "b4 q9 s40 steps8 hq4 hkv1 d64 p16 f16 life bshd seed122",
                                         "b8 q1 s60 steps4 hq8 hkv2 d128 p16 bf16 sbhd seed123")));

/// A graph of one layer for 2 sequences, 6 tokens, 4 of one, 32 keys.
class SmallGraph : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    value_ = make_case(parse_spec("b2 q2 s8 steps1 hq2 hkv1 d16 p4 f32 seed131"));
    value_.cache.max_num_seqs = 4;
    value_.cache.max_seq_len = 64;
    value_.cache.num_pages = 0;
    value_.attention.backend = Backend::Unfused;
    cache_.emplace(gpu_config(value_, 1));
    attention_.emplace(value_.attention, cache_->config());
    tensors_.emplace(value_, maxima_);
    graph_.emplace(*attention_, *cache_, maxima_, std::vector{tensors_->layer()});
  }

  std::string refused(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
      return error.what();
    }
    return "nothing was thrown";
  }
  std::string replay_refused(const std::vector<SequenceStep>& lines) {
    const StepPlan plan = cache_->plan(lines).plan();
    cache_->begin(plan);
    return refused([&] { graph_->replay(plan); });
  }
  std::string capture_refused(const StepMaxima& maxima) {
    return refused(
        [&] { GraphedStep graph(*attention_, *cache_, maxima, std::vector{tensors_->layer()}); });
  }

  const StepMaxima maxima_{.num_seqs = 2, .num_tokens = 6, .max_new_tokens = 4, .max_kv_len = 32};
  Case value_;
  std::optional<KvCache> cache_;
  std::optional<Attention> attention_;
  std::optional<FixedTensors> tensors_;
  std::optional<GraphedStep> graph_;
};

TEST_F(SmallGraph, RefusesAStepBeyondItsMaxima) {
  EXPECT_EQ(replay_refused({{1, 1}, {2, 1}, {3, 1}}), "plan.num_seqs: wanted at most 2, got 3");
  EXPECT_EQ(replay_refused({{1, 4}, {2, 3}}), "plan.num_tokens: wanted at most 6, got 7");
  EXPECT_EQ(replay_refused({{1, 5}}), "plan.max_new_tokens: wanted at most 4, got 5");
  for (int i = 0; i < 5; ++i) EXPECT_EQ(replay_refused({{2, 4}}), "nothing was thrown");
  for (int i = 0; i < 5; ++i) static_cast<void>(replay_refused({{2, 4}}));
  EXPECT_THAT(replay_refused({{2, 1}}), HasSubstr("plan.max_kv_len: wanted at most 32, got"));
}

TEST_F(SmallGraph, RefusesAPlanThatWasNotBegun) {
  const StepPlan plan = cache_->plan({{1, 1}}).plan();
  EXPECT_THAT(refused([&] { graph_->replay(plan); }),
              HasSubstr("plan: wanted the one that this cache began last"));
}

TEST_F(SmallGraph, RefusesMaximaThatTheCacheCannotHold) {
  StepMaxima maxima = maxima_;
  maxima.num_seqs = 5;
  EXPECT_EQ(capture_refused(maxima), "maxima.num_seqs: wanted at most 4 (the cache's), got 5");
  maxima = maxima_;
  maxima.max_kv_len = 65;
  EXPECT_EQ(capture_refused(maxima), "maxima.max_kv_len: wanted at most 64 (the cache's), got 65");
  maxima = maxima_;
  maxima.num_tokens = 0;
  EXPECT_EQ(capture_refused(maxima), "maxima.num_tokens: wanted at least 1, got 0");
}

TEST_F(SmallGraph, RefusesTensorsThatAreSmallerThanTheMaxima) {
  StepMaxima maxima = maxima_;
  maxima.num_tokens = 7;
  EXPECT_EQ(capture_refused(maxima), "k.shape: wanted [>= 7, 1, 16] (thd), got [6, 1, 16]");
}

TEST_F(SmallGraph, RefusesMoreLayersThanTheCacheHas) {
  EXPECT_EQ(refused([&] {
              GraphedStep graph(*attention_, *cache_, maxima_,
                                std::vector{tensors_->layer(), tensors_->layer()});
            }),
            "layers: wanted 1 … 1 (the cache's), got 2");
}

/// A stream that captures in the strictest mode: other threads' unsafe calls are forbidden too.
class GlobalCapture {
 public:
  GlobalCapture() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~GlobalCapture() {
    if (exec_ != nullptr) static_cast<void>(cudaGraphExecDestroy(exec_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  GlobalCapture(const GlobalCapture&) = delete;
  GlobalCapture& operator=(const GlobalCapture&) = delete;

  void capture(const std::function<void(Stream)>& enqueue) {
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_NO_THROW(enqueue({stream_}));
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec_, graph, 0), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  void replay() {
    ASSERT_EQ(cudaGraphLaunch(exec_, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }
  [[nodiscard]] Stream stream() const { return {stream_}; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

class CapturedByCaller : public GpuTestWith<Backend> {
 protected:
  void SetUp() override {
    GpuTestWith::SetUp();
    if (IsSkipped() || HasFatalFailure() || GetParam() != Backend::Fused) return;
    const std::string trouble = fused_trouble();
    if (!trouble.empty()) GTEST_SKIP() << trouble;
  }
};

// Append and attention over our own cache, with maxima, in a graph of the caller's.
TEST_P(CapturedByCaller, StepServesOtherSteps) {
  const Case value = make_case(parse_spec("b3 q2 s20 steps6 hq4 hkv2 d64 p4 bf16 seed141"));
  KvCache cache(gpu_config(value, 1));
  AttentionConfig config = value.attention;
  config.backend = GetParam();
  const Attention attention(config, cache.config());
  const StepMaxima maxima = maxima_of(value, 2);
  FixedTensors tensors(value, maxima);
  LayerTensors layer = tensors.layer();
  layer.inputs.maxima = &maxima;
  GlobalCapture graph;
  Comparison total;
  for (std::size_t i = 0; i < value.steps.size(); ++i) {
    const StepPlan plan = begin_step(cache, value.steps[i]);
    tensors.upload(value.steps[i]);
    const auto forward = [&](Stream stream) {
      attention.forward(plan, cache, 0, layer.inputs, layer.out, &*layer.lse, stream);
    };
    if (i == 0) {
      forward({});  // backends prepare for the maxima outside the capture
      testkit::synchronize(kGpu);
      graph.capture(forward);
      tensors.upload(value.steps[i]);
    }
    graph.replay();
    tensors.compare(i, total);
  }
  EXPECT_TRUE(total.ok()) << total.worst.to_string();
}

// The same over a caller's cache, its plan in the graph too.
TEST_P(CapturedByCaller, PlanServesOtherSteps) {
  const Case value = make_case(parse_spec("b3 q2 s20 steps6 hq4 hkv2 d64 p4 bf16 seed142"));
  AttentionConfig config = value.attention;
  config.backend = GetParam();
  const StepMaxima maxima = maxima_of(value, 2);
  FixedTensors tensors(value, maxima);
  const LayerTensors layer = tensors.layer();
  GpuCallersCache cache(value, PoolLayout::Nhd, 4);
  GlobalCapture graph;
  Comparison total;
  for (std::size_t i = 0; i < value.steps.size(); ++i) {
    cache.prepare(value.steps[i]);
    StepArrays arrays = cache.arrays();
    arrays.num_tokens = maxima.num_tokens;
    arrays.max_new_tokens = maxima.max_new_tokens;
    tensors.upload(value.steps[i]);
    const auto run = [&](Stream stream) {
      cache.workspace().plan(cache.view(), arrays, stream);
      append_tokens(config, cache.view(), arrays, layer.inputs, stream);
      attend(config, cache.view(), arrays, layer.inputs, layer.out, &*layer.lse, stream);
    };
    if (i == 0) {
      cache.arrays() = arrays;
      cache.take_workspace(config, layer.inputs, layer.out, &*layer.lse);
      run({});
      testkit::synchronize(kGpu);
      graph.capture(run);
      tensors.upload(value.steps[i]);
    }
    graph.replay();
    cache.workspace().check(graph.stream());
    tensors.compare(i, total);
  }
  EXPECT_TRUE(total.ok()) << total.worst.to_string();
}

INSTANTIATE_TEST_SUITE_P(Backends, CapturedByCaller,
                         ::testing::Values(Backend::Unfused, Backend::Fused),
                         conformance::backend_name);

}  // namespace
}  // namespace octavo::gpu_tests
