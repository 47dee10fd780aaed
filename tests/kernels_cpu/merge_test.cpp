// SPDX-License-Identifier: Apache-2.0
// Merging of partials.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/kernels.h"

namespace octavo::test {
namespace {

using kernels::cpu::MergeParams;
using kernels::cpu::MergePartial;

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One token, one head, two dims.
struct Row {
  std::vector<float> out;
  float lse;
};

Row merged(const std::vector<Row>& rows, const float* sink = nullptr) {
  std::vector<MergePartial> partials;
  for (const Row& row : rows) {
    MergePartial partial;
    partial.out.data = row.out.data();
    partial.lse = &row.lse;
    partials.push_back(partial);
  }
  Row result{{9.0F, 9.0F}, 9.0F};
  MergeParams params;
  params.partials = partials.data();
  params.num_partials = static_cast<std::int32_t>(partials.size());
  params.out.data = result.out.data();
  params.lse = &result.lse;
  params.sinks = sink;
  params.num_tokens = 1;
  params.num_heads = 1;
  params.head_dim_v = 2;
  kernels::cpu::merge_partials(params);
  return result;
}

TEST(Merge, WeighsByTheExponentialOfTheLse) {
  const Row row = merged({{{1.0F, 2.0F}, 0.0F}, {{4.0F, 8.0F}, std::log(3.0F)}});
  EXPECT_NEAR(row.out[0], 0.25F * 1.0F + 0.75F * 4.0F, 1e-6F);
  EXPECT_NEAR(row.out[1], 0.25F * 2.0F + 0.75F * 8.0F, 1e-6F);
  EXPECT_NEAR(row.lse, std::log(4.0F), 1e-6F);
}

TEST(Merge, DoesNotReadAPartialWithoutKeys) {
  const Row row =
      merged({{{kNan, kNan}, kNothing}, {{4.0F, 8.0F}, 2.0F}, {{kNan, 0.0F}, kNothing}});
  EXPECT_EQ(row.out, (std::vector<float>{4.0F, 8.0F}));
  EXPECT_EQ(row.lse, 2.0F);
}

TEST(Merge, GivesZeroAndMinusInfinityWithoutKeys) {
  const float sink = 1.0F;
  const Row row = merged({{{kNan, kNan}, kNothing}}, &sink);
  EXPECT_EQ(row.out, (std::vector<float>{0.0F, 0.0F}));
  EXPECT_EQ(row.lse, kNothing);
}

TEST(Merge, OfNothingIsTheNeutralElement) {
  const Row row = merged({});
  EXPECT_EQ(row.out, (std::vector<float>{0.0F, 0.0F}));
  EXPECT_EQ(row.lse, kNothing);
}

TEST(Merge, AppliesSinksOnceAndKeepsThemOutOfTheLse) {
  const float sink = std::log(4.0F);
  const Row row = merged({{{1.0F, 2.0F}, 0.0F}, {{4.0F, 8.0F}, std::log(3.0F)}}, &sink);
  EXPECT_NEAR(row.out[0], 0.5F * 3.25F, 1e-6F);
  EXPECT_NEAR(row.lse, std::log(4.0F), 1e-6F);
}

TEST(Merge, HoldsForSinksAndLsesFarApart) {
  const float sink = 5000.0F;
  const Row hidden = merged({{{1.0F, 2.0F}, -3000.0F}}, &sink);
  EXPECT_EQ(hidden.out[0], 0.0F);
  const float weak = -5000.0F;
  const Row shown = merged({{{1.0F, 2.0F}, 3000.0F}, {{7.0F, 7.0F}, -3000.0F}}, &weak);
  EXPECT_EQ(shown.out, (std::vector<float>{1.0F, 2.0F}));
  EXPECT_EQ(shown.lse, 3000.0F);
}

}  // namespace
}  // namespace octavo::test
