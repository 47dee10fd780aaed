// SPDX-License-Identifier: Apache-2.0
// How flash2 cuts a step: the closed form against the plan's, and the bounds that a host goes by.
// Host arithmetic, so that no GPU is needed.
#include "kernels/cuda/flash2/rules.h"
#include "plan/schedule.h"
#include "testing/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace octavo::gpu_tests {
namespace {

using kernels::AttendParams;
using kernels::flash2::Cut;
using kernels::flash2::cut_bounds;
using kernels::flash2::cut_of;
using kernels::flash2::cut_shape;
using kernels::flash2::CutBounds;
using kernels::flash2::CutShape;
using kernels::flash2::kTileKeys;
using kernels::flash2::kTileRows;
using kernels::flash2::run_length;
using kernels::flash2::Tiling;
using kernels::flash2::tiling_of;
using kernels::flash2::work_of;

struct Step {
  std::vector<std::int32_t> offsets{0};
  std::vector<std::int32_t> kv_lens;
};

Step random_step(testkit::Random& random) {
  const auto up_to = [&](std::int32_t most) {
    return static_cast<std::int32_t>(random.uniform() * (most + 1));
  };
  Step step;
  const std::int32_t num_seqs = up_to(40);
  const std::int32_t most_new = random.uniform() < 0.5 ? 4 : 600;
  const std::int32_t most_past = random.uniform() < 0.3 ? 200'000 : 2000;
  for (std::int32_t b = 0; b < num_seqs; ++b) {
    const std::int32_t new_tokens = up_to(most_new);
    step.offsets.push_back(step.offsets.back() + new_tokens);
    step.kv_lens.push_back(random.uniform() < 0.2 ? 0 : up_to(most_past) + new_tokens);
  }
  return step;
}

AttendParams random_params(testkit::Random& random) {
  constexpr std::int32_t kGroups[] = {1, 2, 3, 4, 5, 7, 8, 12, 14, 16, 64, 65, 130};
  constexpr std::int32_t kHeads[] = {1, 2, 5, 8, 300};
  AttendParams params;
  params.num_kv_heads = kHeads[static_cast<int>(random.uniform() * 5) % 5];
  params.num_q_heads = params.num_kv_heads * kGroups[static_cast<int>(random.uniform() * 13) % 13];
  params.causal = random.uniform() < 0.6;
  if (random.uniform() < 0.4) params.window_left = static_cast<int>(random.uniform() * 1000);
  if (random.uniform() < 0.3) params.window_right = static_cast<int>(random.uniform() * 300);
  params.batch_invariant = random.uniform() < 0.5;
  return params;
}

TEST(Flash2Cut, IsThePlansAndWithinItsBounds) {
  testkit::Random random(451);
  for (int i = 0; i < 3000; ++i) {
    const AttendParams params = random_params(random);
    const Step step = random_step(random);
    const CutShape shape = cut_shape(params);
    plan::Schedule expected;
    plan::make_schedule(step.offsets, step.kv_lens,
                        {.key_tile = kTileKeys,
                         .q_tile = shape.q_tile,
                         .num_kv_heads = shape.head_tiles,
                         .causal = params.causal,
                         .window_left = params.window_left,
                         .window_right = params.window_right,
                         .batch_invariant = params.batch_invariant},
                        expected);
    std::int64_t work = 0;
    std::int32_t longest = 0;
    const auto new_tokens = [&](std::size_t b) { return step.offsets[b + 1] - step.offsets[b]; };
    for (std::size_t b = 0; b < step.kv_lens.size(); ++b) {
      work += work_of(shape, new_tokens(b), step.kv_lens[b]);
      longest = std::max(longest, step.kv_lens[b]);
    }
    const std::int64_t run = run_length(shape, work);
    std::int64_t items = 0;
    std::int64_t partials = 0;
    for (std::size_t b = 0; b < step.kv_lens.size(); ++b) {
      const Cut cut = cut_of(shape, new_tokens(b), step.kv_lens[b], run);
      EXPECT_EQ(cut.split_tiles, expected.split_tiles[b]);
      EXPECT_EQ(cut.num_splits, expected.num_splits[b]);
      items += cut.num_items;
      partials += cut.num_partial_rows;
      ASSERT_EQ(items, expected.item_offsets[b + 1]);
      ASSERT_EQ(partials, expected.partial_offsets[b + 1]);
    }
    const CutBounds bounds = cut_bounds(shape, static_cast<std::int64_t>(step.kv_lens.size()),
                                        step.offsets.back(), longest);
    ASSERT_LE(items, bounds.num_items);
    ASSERT_LE(partials, bounds.num_partial_rows);
  }
}

TEST(Flash2Cut, TakesLittleWorkspaceForLongPrompts) {
  AttendParams params;
  params.num_q_heads = 32;
  params.num_kv_heads = 8;
  const CutBounds bounds = cut_bounds(cut_shape(params), 256, 1 << 20, 1 << 20);
  EXPECT_LE(bounds.num_partial_rows * params.num_q_heads, 2 * kTileRows * 256);
}

TEST(Flash2Cut, PacksTheHeadsOfAGroup) {
  EXPECT_EQ(tiling_of(32, 8).q_tile, 16);
  EXPECT_EQ(tiling_of(14, 2).q_tile, 9);
  EXPECT_EQ(tiling_of(64, 1).q_tile, 1);
  const Tiling wide = tiling_of(130, 1);
  EXPECT_EQ(wide.tiles_per_group, 3);
  EXPECT_EQ(wide.heads, 44);
  EXPECT_EQ(wide.head_tiles, 3);
}

}  // namespace
}  // namespace octavo::gpu_tests
