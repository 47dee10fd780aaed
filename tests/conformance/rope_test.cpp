// SPDX-License-Identifier: Apache-2.0
// Rotation within the append and on the way to the scores, against the oracle's.
#include "testing/compare.h"
#include "testing/number.h"
#include "testing/oracle.h"
#include "testing/random.h"
#include "tests/conformance/suite.h"

#include <octavo/attention.h>
#include <octavo/cache.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

namespace octavo::conformance {
namespace {

using ::testing::Combine;
using ::testing::TestWithParam;
using ::testing::Values;
using ::testing::ValuesIn;
using testkit::excess_of;
using testkit::HostTensor;
using testkit::OracleResult;
using testkit::OracleSequence;

constexpr std::int32_t kQHeads = 4;
constexpr std::int32_t kKvHeads = 2;
constexpr std::int32_t kDim = 24;
constexpr std::int32_t kSteps[] = {37, 1, 5};

// One sequence over three steps, with a rope; answers from the oracle.
class RopeRun {
 public:
  RopeRun(Backend backend, DType dtype, const Rope& rope) : dtype_(dtype), rope_(rope) {
    cache_config_.num_kv_heads = kKvHeads;
    cache_config_.head_dim = kDim;
    cache_config_.dtype = dtype;
    cache_config_.max_seq_len = 64;
    cache_config_.page_size = 7;
    config_.num_q_heads = kQHeads;
    config_.num_kv_heads = kKvHeads;
    config_.head_dim = kDim;
    config_.backend = backend;
  }

  // Position of a token whose plan says `planned`.
  std::int32_t (*position)(std::int32_t planned) = [](std::int32_t planned) { return planned; };
  bool explicit_positions = false;

  // The worst excess over the dtype's tolerance.
  double run() {
    KvCache cache(cache_config_);
    const Attention attention(config_, cache.config());
    testkit::Random random(81);
    double worst = 0.0;
    std::int32_t past = 0;
    for (const std::int32_t tokens : kSteps) {
      const PlanOutcome outcome = cache.plan({{5, tokens}});
      cache.begin(outcome.plan());
      HostTensor q(dtype_, {tokens, kQHeads, kDim});
      HostTensor k(dtype_, {tokens, kKvHeads, kDim});
      HostTensor v(dtype_, {tokens, kKvHeads, kDim});
      for (HostTensor* tensor : {&q, &k, &v}) random.fill_normal(*tensor);
      HostTensor out(dtype_, {tokens, kQHeads, kDim});
      std::vector<std::int32_t> positions;
      for (std::int32_t i = 0; i < tokens; ++i) positions.push_back(position(past + i));
      LayerInputs inputs;
      inputs.q = q.view();
      inputs.k = k.view();
      inputs.v = v.view();
      inputs.rope = &rope_;
      if (explicit_positions) inputs.positions = positions.data();
      attention.forward(outcome.plan(), cache, 0, inputs, out.view());
      past += tokens;
      const std::vector<double> wanted = answer(q, k, v, positions, past);
      const testkit::Tolerance tolerance = testkit::tolerance_of(dtype_, Compute::Same);
      for (std::int64_t i = 0; i < out.size(); ++i) {
        worst = std::max(worst, excess_of(wanted[static_cast<std::size_t>(i)], out.get(i),
                                          tolerance.atol, tolerance.rtol));
      }
    }
    return worst;
  }

 private:
  std::vector<double> answer(const HostTensor& q, const HostTensor& k, const HostTensor& v,
                             const std::vector<std::int32_t>& positions, std::int64_t kv_len) {
    std::vector<double> turned_q = turned(q, kQHeads, positions);
    for (const double number : turned(k, kKvHeads, positions)) {
      // The cache keeps rotated K in its own dtype.
      keys_.push_back(testkit::rounded(dtype_, number));
    }
    for (std::int64_t i = 0; i < v.size(); ++i) values_.push_back(v.get(i));
    OracleSequence sequence;
    sequence.q = turned_q;
    sequence.num_queries = static_cast<std::int64_t>(positions.size());
    sequence.kv_len = kv_len;
    const std::vector<std::int32_t> pages = {0};
    sequence.keys = {keys_, pages, kv_len, kKvHeads, kDim};
    sequence.values = {values_, pages, kv_len, kKvHeads, kDim};
    return attend_by_definition(config_, sequence).out;
  }

  std::vector<double> turned(const HostTensor& tensor, std::int64_t heads,
                             const std::vector<std::int32_t>& positions) const {
    std::vector<double> numbers;
    for (std::int64_t i = 0; i < tensor.size(); ++i) numbers.push_back(tensor.get(i));
    for (std::size_t row = 0; row < positions.size() * static_cast<std::size_t>(heads); ++row) {
      testkit::rotate_by_definition(rope_, positions[row / static_cast<std::size_t>(heads)],
                                    std::span(numbers).subspan(row * kDim, kDim));
    }
    return numbers;
  }

  DType dtype_;
  Rope rope_;
  CacheConfig cache_config_;
  AttentionConfig config_;
  std::vector<double> keys_, values_;
};

class Roped : public TestWithParam<std::tuple<Backend, RopeStyle, DType>> {
 protected:
  RopeRun make(std::int32_t rotary_dim) const {
    Rope rope;
    rope.style = std::get<1>(GetParam());
    rope.rotary_dim = rotary_dim;
    return {std::get<0>(GetParam()), std::get<2>(GetParam()), rope};
  }
};

TEST_P(Roped, TurnsWholeHeads) { EXPECT_LE(make(0).run(), 1.0); }

TEST_P(Roped, TurnsPartOfAHead) { EXPECT_LE(make(10).run(), 1.0); }

TEST_P(Roped, TakesExplicitPositions) {
  RopeRun run = make(0);
  run.explicit_positions = true;
  run.position = [](std::int32_t planned) { return 1000 - 3 * planned; };
  EXPECT_LE(run.run(), 1.0);
}

TEST_P(Roped, TakesTheCallersTables) {
  constexpr std::size_t kPairs = kDim / 2;
  std::vector<float> cosines(64 * kPairs);
  std::vector<float> sines(64 * kPairs);
  testkit::Random random(82);
  for (std::size_t i = 0; i < cosines.size(); ++i) {
    const double angle = 6.0 * random.uniform();
    cosines[i] = static_cast<float>(std::cos(angle));
    sines[i] = static_cast<float>(std::sin(angle));
  }
  Rope rope;
  rope.style = std::get<1>(GetParam());
  rope.cos = cosines.data();
  rope.sin = sines.data();
  rope.num_table_positions = 64;
  EXPECT_LE(RopeRun(std::get<0>(GetParam()), std::get<2>(GetParam()), rope).run(), 1.0);
}

INSTANTIATE_TEST_SUITE_P(Backends, Roped,
                         Combine(ValuesIn(usable_backends()),
                                 Values(RopeStyle::Half, RopeStyle::Interleaved),
                                 Values(DType::F32, DType::BF16)));

}  // namespace
}  // namespace octavo::conformance
