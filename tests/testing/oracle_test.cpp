// SPDX-License-Identifier: Apache-2.0
// The oracle against small sums done by hand, and against the NumPy reference that wrote the files
// in tests/data/cases.
#include "testing/oracle.h"

#include "testing/case_file.h"
#include "testing/number.h"
#include "testing/spec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <numbers>
#include <vector>

namespace octavo::testkit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One head of one element, two keys, on one page of two slots.
struct TwoKeys {
  std::vector<double> q = {1.0};
  std::vector<double> keys = {0.5, 2.0};
  std::vector<double> values = {10.0, 20.0};
  std::vector<std::int32_t> pages = {0};
  AttentionConfig config;
  OracleSequence sequence;

  TwoKeys() {
    config.head_dim = 1;
    config.softmax_scale = 1.0F;
    sequence.num_queries = 1;
    sequence.kv_len = 2;
  }

  OracleResult run() {
    sequence.q = q;
    sequence.keys = {keys, pages, 2, 1, 1};
    sequence.values = {values, pages, 2, 1, 1};
    return attend_by_definition(config, sequence);
  }
};

TEST(Oracle, WeighsTwoKeysAsTheSoftmaxSays) {
  const OracleResult result = TwoKeys().run();
  const double first = std::exp(0.5) / (std::exp(0.5) + std::exp(2.0));
  EXPECT_NEAR(result.out[0], 10.0 * first + 20.0 * (1.0 - first), 1e-12);
}

TEST(Oracle, GivesTheNaturalLogOfTheSumAsLse) {
  EXPECT_NEAR(TwoKeys().run().lse[0], std::log(std::exp(0.5) + std::exp(2.0)), 1e-12);
}

TEST(Oracle, LetsASinkTakeWeightButNotShowInTheLse) {
  TwoKeys two;
  const float sink = 1.5F;
  two.sequence.sinks = &sink;
  const OracleResult result = two.run();
  const double sum = std::exp(0.5) + std::exp(2.0) + std::exp(1.5);
  EXPECT_NEAR(result.out[0], (10.0 * std::exp(0.5) + 20.0 * std::exp(2.0)) / sum, 1e-12);
  EXPECT_NEAR(result.lse[0], std::log(std::exp(0.5) + std::exp(2.0)), 1e-12);
}

TEST(Oracle, CapsTheScaledLogitAndThenTakesTheSlopesShare) {
  TwoKeys two;
  const float slope = 0.25F;
  two.config.softmax_scale = 3.0F;
  two.config.softcap = 2.0F;
  two.sequence.alibi_slopes = &slope;
  const double s0 = 2.0 * std::tanh(1.5 / 2.0) - 0.25;
  const double s1 = 2.0 * std::tanh(6.0 / 2.0);
  EXPECT_NEAR(two.run().lse[0], std::log(std::exp(s0) + std::exp(s1)), 1e-12);
}

TEST(Oracle, ShowsACausalQueryNothingBehindItself) {
  TwoKeys two;
  two.q = {1.0, 1.0};
  two.sequence.num_queries = 2;
  two.values = {10.0, std::numeric_limits<double>::quiet_NaN()};
  EXPECT_EQ(two.run().out[0], 10.0);
}

TEST(Oracle, LetsAWindowBoundBothSides) {
  TwoKeys two;
  two.config.mask = Mask::Full;
  two.config.window = {0, 0};
  EXPECT_EQ(two.run().out[0], 20.0);
}

TEST(Oracle, GivesZeroAndMinusInfinityToARowWithoutKeys) {
  TwoKeys two;
  // Three queries over one key stand at -2, -1 and 0: only the last one sees it.
  two.sequence.kv_len = 1;
  two.sequence.num_queries = 3;
  two.q = {1.0, 1.0, 1.0};
  const OracleResult result = two.run();
  EXPECT_EQ(result.out[0], 0.0);
  EXPECT_EQ(result.lse[0], -kInfinity);
  EXPECT_EQ(result.out[2], 10.0);
}

TEST(Oracle, WalksThePageTable) {
  TwoKeys two;
  two.keys = {9.0, 9.0, 2.0, 9.0, 0.5, 9.0};
  two.values = {0.0, 0.0, 20.0, 0.0, 10.0, 0.0};
  const std::vector<std::int32_t> pages = {4, 2};
  two.sequence.q = two.q;
  two.sequence.keys = {two.keys, pages, 1, 1, 1};
  two.sequence.values = {two.values, pages, 1, 1, 1};
  const OracleResult paged = attend_by_definition(two.config, two.sequence);
  EXPECT_EQ(paged.out, TwoKeys().run().out);
}

TEST(OracleRope, TurnsHalvesByTheAngleOfTheirPair) {
  std::vector<double> head = {1.0, 0.0, 0.0, 1.0};
  Rope rope;
  rope.base = 100.0;
  rotate_by_definition(rope, 3, head);
  EXPECT_NEAR(head[0], std::cos(3.0), 1e-12);
  EXPECT_NEAR(head[2], std::sin(3.0), 1e-12);
  EXPECT_NEAR(head[1], -std::sin(0.3), 1e-12);
  EXPECT_NEAR(head[3], std::cos(0.3), 1e-12);
}

TEST(OracleRope, TurnsNeighboursAndLeavesTheRest) {
  std::vector<double> head = {1.0, 0.0, 5.0};
  Rope rope;
  rope.style = RopeStyle::Interleaved;
  rope.rotary_dim = 2;
  rotate_by_definition(rope, 2, head);
  EXPECT_NEAR(head[0], std::cos(2.0), 1e-12);
  EXPECT_NEAR(head[1], std::sin(2.0), 1e-12);
  EXPECT_EQ(head[2], 5.0);
}

// Recomputes a file's answers. Files hold them as float32.
class OracleOnFile : public ::testing::TestWithParam<const char*> {};

TEST_P(OracleOnFile, AgreesWithTheNumpyReference) {
  const Case value =
      read_case(std::string(OCTAVO_TEST_DATA_DIR) + "/cases/" + GetParam() + ".safetensors");
  const AttentionConfig& a = value.attention;
  std::map<SequenceId, std::vector<double>> keys;
  std::map<SequenceId, std::vector<double>> values;
  const std::vector<std::int32_t> pages = {0};
  double largest = 0.0;
  std::int64_t compared = 0;
  for (const CaseStep& step : value.steps) {
    for (const SequenceId id : step.release) keys.erase(id), values.erase(id);
    for (const auto& fork : step.fork)
      keys[fork.to] = keys[fork.from], values[fork.to] = values[fork.from];
    for (const auto& cut : step.truncate) {
      keys[cut.id].resize(static_cast<std::size_t>(cut.length * a.num_kv_heads * a.head_dim));
      values[cut.id].resize(static_cast<std::size_t>(cut.length * a.num_kv_heads * a.head_dim_v));
    }
    std::int64_t start = 0;
    for (std::size_t b = 0; b < step.sequences.size(); ++b) {
      const auto& [id, tokens] = step.sequences[b];
      std::vector<double> q;
      const auto take = [&](const HostTensor& tensor, std::int64_t token, std::int64_t width,
                            std::vector<double>& into) {
        const std::int64_t row =
            row_of(value.format, tensor.shape(), static_cast<std::int64_t>(b), token, start);
        for (std::int64_t i = 0; i < width; ++i) into.push_back(tensor.get(row * width + i));
      };
      for (std::int64_t token = 0; token < tokens; ++token) {
        take(step.q, token, std::int64_t{a.num_q_heads} * a.head_dim, q);
        take(step.k, token, std::int64_t{a.num_kv_heads} * a.head_dim, keys[id]);
        take(step.v, token, std::int64_t{a.num_kv_heads} * a.head_dim_v, values[id]);
      }
      OracleSequence sequence;
      sequence.q = q;
      sequence.num_queries = tokens;
      sequence.kv_len = static_cast<std::int64_t>(keys[id].size()) / a.num_kv_heads / a.head_dim;
      sequence.keys = {keys[id], pages, sequence.kv_len + 1, a.num_kv_heads, a.head_dim};
      sequence.values = {values[id], pages, sequence.kv_len + 1, a.num_kv_heads, a.head_dim_v};
      if (value.sinks) sequence.sinks = reinterpret_cast<const float*>(value.sinks->data());
      if (value.alibi_slopes)
        sequence.alibi_slopes = reinterpret_cast<const float*>(value.alibi_slopes->data());
      const OracleResult result = attend_by_definition(a, sequence);
      std::vector<double> wanted;
      for (std::int64_t token = 0; token < tokens; ++token) {
        take(step.out, token, std::int64_t{a.num_q_heads} * a.head_dim_v, wanted);
      }
      ASSERT_EQ(result.out.size(), wanted.size());
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        largest = std::max(largest, std::fabs(result.out[i] - wanted[i]));
      }
      compared += static_cast<std::int64_t>(wanted.size());
      start += tokens;
    }
  }
  EXPECT_GT(compared, 0);
  EXPECT_LT(largest, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Cases, OracleOnFile,
                         ::testing::Values("f32_zero_tokens", "f32_fork", "f16_d96", "bf16_sinks",
                                           "bf16_window_both_sides", "small_bf16_everything",
                                           "small_f32_paged_forks",
                                           "small_bf16_contiguous_sbhd_arrivals"));

}  // namespace
}  // namespace octavo::testkit
