// SPDX-License-Identifier: Apache-2.0
// What must hold between computations, whatever the numbers: the same bits where the contract
// promises them, and that nothing depends on what it mustn't.
#include "tests/conformance/suite.h"

#include <octavo/attention.h>
#include <octavo/cache.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

namespace octavo::conformance {
namespace {

using ::testing::Combine;
using ::testing::TestWithParam;
using ::testing::Values;
using ::testing::ValuesIn;
using testkit::HostTensor;
using testkit::make_case;
using testkit::parse_spec;

// Lines long enough for several tiles and splits, with lives and all features among them.
const std::vector<std::string>& long_lines() {
  static const std::vector<std::string> lines = {
      "b3 q2 s300 steps3 hq6 hkv2 d40 p16 f32 seed41",
      "b2 q1 s600 steps3 hq8 hkv1 d64 p16 bf16 seed42",
      "b2 q1 s300 steps2 hq16 hkv8 d128 p16 bf16 w150,0 seed45",
      "b5 q3 s40 steps16 hq4 hkv2 d16 p16 f16 life bshd seed43",
      "b2 q3 s150 hq6 hkv2 d48 dv24 p16 f32 full w60,4 cap10 sinks alibi seed44",
  };
  return lines;
}

ReplayOptions on(Backend backend) {
  ReplayOptions options;
  options.backend = backend;
  return options;
}

class OwnKernel : public TestWithParam<std::tuple<Backend, std::string>> {
 protected:
  Backend backend() const { return std::get<0>(GetParam()); }
  Case value() const { return make_case(parse_spec(std::get<1>(GetParam()))); }
};

// Backends for which the contract promises the same bits whatever the cache.
std::vector<Backend> own_kernels() {
  std::vector<Backend> own;
  for (const Backend backend : usable_backends()) {
    if (backend == Backend::Cpu || backend == Backend::Flash2 || backend == Backend::Flash3) {
      own.push_back(backend);
    }
  }
  return own;
}

TEST_P(OwnKernel, GivesTheSameBitsPagedAndContiguous) {
  ReplayOptions contiguous = on(backend());
  contiguous.kind = CacheKind::Contiguous;
  expect_same_bits(value(), on(backend()), contiguous);
}

TEST_P(OwnKernel, GivesTheSameBitsWhereverThePagesLie) {
  ReplayOptions scrambled = on(backend());
  scrambled.scramble = 17;
  expect_same_bits(value(), on(backend()), scrambled);
}

INSTANTIATE_TEST_SUITE_P(Lines, OwnKernel, Combine(ValuesIn(own_kernels()), ValuesIn(long_lines())),
                         line_name);

class PageSize : public TestWithParam<std::tuple<Backend, std::int32_t>> {};

TEST_P(PageSize, DoesNotShowInTheBits) {
  const auto& [backend, page_size] = GetParam();
  ReplayOptions other = on(backend);
  other.page_size = page_size;
  for (const std::string& line : long_lines()) {
    SCOPED_TRACE(line);
    expect_same_bits(make_case(parse_spec(line)), on(backend), other);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, PageSize,
                         Combine(ValuesIn(own_kernels()), Values(1, 2, 3, 7, 64, 256)));

class Threads : public TestWithParam<std::tuple<Backend, std::string>> {};

TEST_P(Threads, DoNotShowInTheBits) {
  const auto& [backend, line] = GetParam();
  const Case value = make_case(parse_spec(line));
  ReplayOptions one = on(backend);
  one.num_threads = 1;
  for (const std::int32_t threads : {2, 3}) {
    SCOPED_TRACE(threads);
    ReplayOptions several = on(backend);
    several.num_threads = threads;
    expect_same_bits(value, one, several);
  }
}

TEST_P(Threads, AreTheDefaultNumberInsideACallersParallelRegionToo) {
  const auto& [backend, line] = GetParam();
  const Case value = make_case(parse_spec(line));
  const Backend chosen = backend;
  int passed = 0;
#pragma omp parallel num_threads(2) reduction(+ : passed)
  passed += replay(value, on(chosen)).verdict == testkit::Verdict::Pass ? 1 : 0;
  EXPECT_EQ(passed, 2);
}

TEST_P(Threads, AppendThenAttendEqualsForward) {
  const auto& [backend, line] = GetParam();
  ReplayOptions halves = on(backend);
  halves.in_halves = true;
  expect_same_bits(make_case(parse_spec(line)), on(backend), halves);
}

TEST_P(Threads, OutputInF32PassesToo) {
  const auto& [backend, line] = GetParam();
  ReplayOptions wide = on(backend);
  wide.out_dtype = DType::F32;
  expect_pass(make_case(parse_spec(line)), wide);
}

INSTANTIATE_TEST_SUITE_P(Lines, Threads,
                         Combine(ValuesIn(usable_backends()), ValuesIn(long_lines())), line_name);

class Batch : public TestWithParam<Backend> {};

TEST_P(Batch, MatesDoNotShowInTheBitsWhenInvariant) {
  const Case value = make_case(parse_spec("b4 q2 s400 steps3 hq6 hkv2 d32 p16 bf16 seed51"));
  ReplayOptions options = on(GetParam());
  options.batch_invariant = true;
  options.keep_outputs = true;
  const ReplayResult together = replay(value, options);
  for (std::size_t row = 0; row < 4; ++row) {
    SCOPED_TRACE(row);
    Case alone = select_rows(value, {row});
    alone.cache.max_num_seqs = 1;
    const ReplayResult single = replay(alone, options);
    ASSERT_EQ(single.verdict, testkit::Verdict::Pass) << single.reason;
    for (std::size_t step = 0; step < value.steps.size(); ++step) {
      EXPECT_EQ(rows_of(alone, step, 0, single.outs[step]),
                rows_of(value, step, row, together.outs[step]));
    }
  }
}

TEST_P(Batch, OrderDoesNotShowInTheBitsWhenInvariant) {
  const Case value = make_case(parse_spec("b4 q2 s400 steps3 hq6 hkv2 d32 p16 bf16 bshd seed52"));
  const std::vector<std::size_t> order = {2, 0, 3, 1};
  const Case permuted = select_rows(value, order);
  ReplayOptions options = on(GetParam());
  options.batch_invariant = true;
  options.keep_outputs = true;
  const ReplayResult direct = replay(value, options);
  const ReplayResult turned = replay(permuted, options);
  ASSERT_EQ(turned.verdict, testkit::Verdict::Pass) << turned.reason;
  for (std::size_t row = 0; row < order.size(); ++row) {
    EXPECT_EQ(rows_of(permuted, 2, row, turned.outs[2]),
              rows_of(value, 2, order[row], direct.outs[2]));
  }
}

TEST_P(Batch, OrderLeavesResultsRight) {
  const Case value = make_case(parse_spec("b4 q2 s400 steps3 hq6 hkv2 d32 p16 f32 sbhd seed53"));
  expect_pass(select_rows(value, {3, 1, 0, 2}), on(GetParam()));
}

TEST_P(Batch, ChunksGiveWhatOneStepGives) {
  const Case whole = make_case(parse_spec("b3 s200 steps1 hq4 hkv2 d32 p16 f32 seed54"));
  for (const std::int64_t chunk : {1, 7, 64, 199}) {
    SCOPED_TRACE(chunk);
    expect_pass(in_chunks(whole, chunk), on(GetParam()));
  }
}

TEST_P(Batch, FutureTokensDoNotChangeThePast) {
  Case value = make_case(parse_spec("b1 s150 steps1 hq4 hkv2 d32 p16 f32 seed55"));
  ReplayOptions options = on(GetParam());
  options.keep_outputs = true;
  const ReplayResult before = replay(value, options);
  // Other numbers from token 100 on.
  testkit::CaseStep& step = value.steps[0];
  for (std::int64_t i = 100 * 2 * 32; i < step.k.size(); ++i) {
    step.k.set(i, 3.0 - step.k.get(i));
    step.v.set(i, 5.0 - step.v.get(i));
  }
  const ReplayResult after = replay(value, options);
  ASSERT_EQ(before.outs.size(), 1U);
  ASSERT_EQ(after.outs.size(), 1U);
  std::int64_t changed_early = 0;
  std::int64_t changed_late = 0;
  for (std::int64_t i = 0; i < before.outs[0].size(); ++i) {
    if (before.outs[0].get(i) == after.outs[0].get(i)) continue;
    ++(i < 100 * 4 * 32 ? changed_early : changed_late);
  }
  EXPECT_EQ(changed_early, 0);
  EXPECT_GT(changed_late, 0);
}

TEST_P(Batch, ConstantValuesGiveThatConstant) {
  Case value = make_case(parse_spec("b3 q2 s130 hq4 hkv2 d32 p16 f32 w40,0 cap4 seed56"));
  for (testkit::CaseStep& step : value.steps) {
    for (std::int64_t i = 0; i < step.v.size(); ++i) step.v.set(i, 0.375);
    for (std::int64_t i = 0; i < step.out.size(); ++i) step.out.set(i, 0.375);
  }
  expect_pass(value, on(GetParam()));
}

TEST_P(Batch, LayersDoNotMix) {
  std::vector<Case> layers;
  for (const int seed : {61, 62, 63}) {
    Case layer = make_case(parse_spec("b3 q2 s50 steps4 hq4 hkv2 d16 p4 bf16 seed61"));
    // The steps of one case, the numbers of another.
    const Case other = make_case(
        parse_spec("b3 q2 s50 steps4 hq4 hkv2 d16 p4 bf16 seed61 mag" + std::to_string(seed - 60)));
    layers.push_back(seed == 61 ? layer : other);
  }
  for (const CacheKind kind : {CacheKind::Paged, CacheKind::Contiguous}) {
    ReplayOptions options = on(GetParam());
    options.kind = kind;
    const ReplayResult result = replay_layers(layers, options);
    EXPECT_EQ(result.verdict, testkit::Verdict::Pass) << result.reason;
  }
}

TEST_P(Batch, UndoLeavesNoTrace) {
  const Case value = make_case(parse_spec("b3 q2 s50 steps2 hq4 hkv2 d16 p4 f32 seed64"));
  KvCache cache(value.cache);
  const PlanOutcome first = cache.plan(value.steps[0].sequences);
  ASSERT_TRUE(first.ok());
  cache.undo(first.plan());
  EXPECT_EQ(cache.sequence_ids(), std::vector<SequenceId>());
  EXPECT_EQ(cache.stats().pages_used, 0);
  const PlanOutcome again = cache.plan(value.steps[0].sequences);
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(first.plan() == again.plan());
}

INSTANTIATE_TEST_SUITE_P(Backends, Batch, ValuesIn(usable_backends()), backend_name);

}  // namespace
}  // namespace octavo::conformance
