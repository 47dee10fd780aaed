// SPDX-License-Identifier: Apache-2.0
// Captured steps: one graph, many steps, each held to the oracle; what a replay refuses; a caller's
// own capture over both kinds of cache.
#include "testing/spec.h"
#include "tests/conformance/suite.h"
#include "tests/gpu/callers.h"
#include "tests/gpu/fixed_tensors.h"
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
    if (!IsSkipped() && !HasFatalFailure()) require_backend(Backend::Fused);
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
                                         "b8 q1 s60 steps4 hq8 hkv2 d128 p16 bf16 sbhd seed123",
                                         "b6 q2 s4 steps8 hq8 hkv2 d128 p4 bf16 seed124")));

class GraphedFlash2 : public GpuTestWith<std::tuple<CacheKind, std::string>> {
 protected:
  void SetUp() override {
    GpuTestWith::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) require_backend(Backend::Flash2);
  }
};

TEST_P(GraphedFlash2, ReplaysAWholeCaseByFlash2) {
  expect_right(std::get<1>(GetParam()), Backend::Flash2, std::get<0>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(
    Flash2, GraphedFlash2,
    ::testing::Combine(
        ::testing::Values(CacheKind::Paged, CacheKind::Contiguous),
        ::testing::Values("b4 q3 s30 steps24 hq3 hkv1 d16 p1 bf16 life sbhd seed30",
                          "b4 q9 s20 steps24 hq2 hkv2 d8 p7 f16 life bshd sinks w11,0 seed31",
                          "b4 q3 s700 steps8 hq4 hkv2 d128 p16 bf16 life seed126",
                          "b4 q1 s500 steps4 hq4 hkv1 d256 p3 f16 seed127",
                          "b4 q3 s90 steps8 hq16 hkv1 d576 dv512 p16 bf16 life seed129")));

/// `bounded`: the eager calls are sized by the same maxima.
void expect_bits_of_eager_calls(const std::string& line, Backend backend, bool bounded) {
  const Case value = make_case(parse_spec(line));
  KvCache cache(gpu_config(value, 1));
  AttentionConfig config = value.attention;
  config.backend = backend;
  const Attention attention(config, cache.config());
  const StepMaxima maxima = maxima_of(value, 3);
  FixedTensors tensors(value, maxima);
  LayerTensors layer = tensors.layer();
  GraphedStep graph(attention, cache, maxima, {&layer, 1});
  if (bounded) layer.inputs.maxima = &maxima;
  for (const CaseStep& step : value.steps) {
    const StepPlan plan = begin_step(cache, step);
    tensors.upload(step);
    attention.forward(plan, cache, 0, layer.inputs, layer.out, &*layer.lse);
    const auto eager = tensors.results();
    tensors.upload(step);
    graph.replay(plan);
    EXPECT_TRUE(tensors.results() == eager);
  }
}

TEST_F(GpuTest, AReplayGivesTheBitsOfAnEagerCallWithTheSameMaxima) {
  expect_bits_of_eager_calls("b4 q3 s30 steps8 hq4 hkv2 d16 p4 bf16 life seed125", Backend::Unfused,
                             true);
}

TEST_F(GpuTest, AReplayByFlash2GivesTheBitsOfAnyEagerCall) {
  require_backend(Backend::Flash2);
  if (IsSkipped()) return;
  for (const bool bounded : {true, false}) {
    expect_bits_of_eager_calls("b4 q3 s700 steps6 hq4 hkv2 d64 p4 bf16 life seed128",
                               Backend::Flash2, bounded);
  }
}

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
    if (!IsSkipped() && !HasFatalFailure()) require_backend(GetParam());
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
                         ::testing::Values(Backend::Unfused, Backend::Fused, Backend::Flash2),
                         conformance::backend_name);

}  // namespace
}  // namespace octavo::gpu_tests
