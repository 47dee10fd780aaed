// SPDX-License-Identifier: Apache-2.0
#include "testing/compare.h"

#include "testing/spec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace octavo::testkit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A case of one step in bshd: sequence 0 brings 4 tokens, sequence 1 fewer; results start right.
struct Compared {
  Case value = make_case(parse_spec("b2 s4 steps1 hq2 hkv1 d4 f32 bshd seed3"));
  HostTensor out = value.steps[0].out;
  HostTensor lse = *value.steps[0].lse;

  Comparison run() {
    Comparison total;
    compare_step(value, 0, out, lse, total);
    return total;
  }
};

TEST(Compare, PassesTheRightAnswer) { EXPECT_TRUE(Compared().run().ok()); }

TEST(Compare, NamesTheElementThatDiffers) {
  Compared compared;
  // Token 2, head 1, dim 3 of sequence 0.
  const std::int64_t element = (2 * 2 + 1) * 4 + 3;
  compared.out.set(element, compared.out.get(element) + 0.5);
  const Comparison result = compared.run();
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.worst.tensor, "out");
  EXPECT_EQ(result.worst.token_idx, 2);
  EXPECT_EQ(result.worst.head, 1);
  EXPECT_EQ(result.worst.dim, 3);
  EXPECT_NEAR(result.worst.error(), 0.5, 1e-6);
}

TEST(Compare, TakesNanForWorseThanAnyNumber) {
  Compared compared;
  compared.out.set(0, 1e30);
  compared.out.set(5, std::nan(""));
  const Comparison result = compared.run();
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.worst.excess, kInfinity);
  EXPECT_EQ(result.worst.dim, 1);
}

TEST(Compare, LooksAtTheLse) {
  Compared compared;
  compared.lse.set(1, compared.lse.get(1) + 1e-3);
  const Comparison result = compared.run();
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.worst.tensor, "lse");
}

TEST(Compare, WantsPaddingToBeExactlyZero) {
  Compared compared;
  ASSERT_LT(compared.value.steps[0].sequences[1].new_tokens, 4);
  compared.out.set(compared.out.size() - 1, 1e-30);
  const Comparison result = compared.run();
  EXPECT_FALSE(result.ok());
  EXPECT_TRUE(result.worst.padding);
}

TEST(Compare, WantsARowWithoutKeysToBeExactlyZero) {
  Compared compared;
  compared.value.steps[0].lse->set(0, -kInfinity);
  for (int dim = 0; dim < 4; ++dim) {
    compared.value.steps[0].out.set(dim, 0.0);
    compared.out.set(dim, dim == 2 ? 1e-30 : 0.0);
  }
  compared.lse.set(0, -kInfinity);
  EXPECT_FALSE(compared.run().ok());
}

TEST(Compare, BoundsTheRelativeRmsOfAStep) {
  Compared compared;
  compared.value.tolerance = {1.0, 1.0, 1e-3};
  for (std::int64_t i = 0; i < 16; ++i) compared.out.set(i, compared.out.get(i) * 1.01);
  const Comparison result = compared.run();
  EXPECT_LT(result.worst.excess, 1.0);
  EXPECT_FALSE(result.ok());
}

TEST(Compare, DoesNotLetAnInfiniteWishBeMetByANumber) {
  EXPECT_EQ(excess_of(-kInfinity, -1e30, 1.0, 1.0), kInfinity);
  EXPECT_EQ(excess_of(-kInfinity, -kInfinity, 0.0, 0.0), 0.0);
  EXPECT_EQ(excess_of(1.0, 1.5, 0.5, 0.5), 0.5);
}

}  // namespace
}  // namespace octavo::testkit
