// SPDX-License-Identifier: Apache-2.0
// Choosing tokens.
#include "examples/generate/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/generate/expect_error.h"

namespace generate::testing {
namespace {

TEST(Sampler, GreedyTakesTheFirstOfTheLikeliest) {
  EXPECT_EQ(Sampler(0.0, 0, 0).pick(std::array{-1.0F, 4.0F, 4.0F, 3.0F}), 1);
}

TEST(Sampler, RefusesLogitsThatAreNotNumbers) {
  const std::array logits = {1.0F, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_THAT(error_of([&] { Sampler(0.0, 0, 0).pick(logits); }),
              ::testing::HasSubstr("logits: wanted finite numbers, got nan"));
}

std::vector<TokenId> draw(double temperature, std::uint64_t seed, std::uint64_t stream, int count) {
  const std::array logits = {0.0F, 1.0F, 2.0F, -30.0F};
  Sampler sampler(temperature, seed, stream);
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(sampler.pick(logits));
  return tokens;
}

TEST(Sampler, DrawsFollowFromSeedAndStream) {
  EXPECT_EQ(draw(1.0, 7, 1, 50), draw(1.0, 7, 1, 50));
  EXPECT_NE(draw(1.0, 7, 1, 50), draw(1.0, 8, 1, 50));
  EXPECT_NE(draw(1.0, 7, 1, 50), draw(1.0, 7, 2, 50));
}

TEST(Sampler, DrawsAsOftenAsTheTemperatureSays) {
  constexpr int kDraws = 20000;
  constexpr double kTemperature = 2.0;
  std::array<int, 4> counts = {};
  for (const TokenId token : draw(kTemperature, 1, 0, kDraws)) {
    ++counts[static_cast<std::size_t>(token)];
  }
  const double total = 1.0 + std::exp(0.5) + std::exp(1.0);
  for (std::size_t i = 0; i < 3; ++i) {
    const double p = std::exp(static_cast<double>(i) / kTemperature) / total;
    // Five standard deviations.
    EXPECT_NEAR(counts[i], p * kDraws, 5.0 * std::sqrt(p * (1.0 - p) * kDraws)) << i;
  }
  EXPECT_EQ(counts[3], 0);
}

TEST(Sampler, ATinyTemperatureIsGreedy) {
  const std::vector<TokenId> tokens = draw(1e-6, 1, 0, 20);
  EXPECT_EQ(tokens, std::vector<TokenId>(20, 2));
}

}  // namespace
}  // namespace generate::testing
