// SPDX-License-Identifier: Apache-2.0
// How flash2 deals a step to blocks: items against the plan's closed form, slots against a count
// of every key tile, and the bounds that a host goes by. Host arithmetic, so that no GPU is needed.
#include "kernels/cuda/flash2/rules.h"
#include "plan/schedule.h"
#include "testing/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
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
using kernels::flash2::divide;
using kernels::flash2::divider_of;
using kernels::flash2::Instance;
using kernels::flash2::instance_of;
using kernels::flash2::is_streamed;
using kernels::flash2::partial_of;
using kernels::flash2::parts_of_group;
using kernels::flash2::Room;
using kernels::flash2::run_length;
using kernels::flash2::Sharing;
using kernels::flash2::sharing_of;
using kernels::flash2::slot_partial_rows;
using kernels::flash2::Slots;
using kernels::flash2::slots_of;
using kernels::flash2::Tiling;
using kernels::flash2::tiling_of;
using kernels::flash2::units_of;
using kernels::flash2::work_of;

constexpr std::size_t kH200Smem = 227 * 1024;
constexpr std::size_t kA100Smem = 163 * 1024;
constexpr std::size_t kSmallSmem = 99 * 1024;

struct Step {
  std::vector<std::int32_t> offsets{0};
  std::vector<std::int32_t> kv_lens;

  [[nodiscard]] std::int32_t new_tokens(std::size_t b) const { return offsets[b + 1] - offsets[b]; }
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

StepMaxima maxima_of(const Step& step) {
  StepMaxima maxima{.num_seqs = static_cast<std::int32_t>(step.kv_lens.size()),
                    .num_tokens = step.offsets.back()};
  for (std::size_t b = 0; b < step.kv_lens.size(); ++b) {
    maxima.max_new_tokens = std::max(maxima.max_new_tokens, step.new_tokens(b));
    maxima.max_kv_len = std::max(maxima.max_kv_len, step.kv_lens[b]);
  }
  return maxima;
}

/// The same lengths where streamed sequences have no tokens.
Step without_streamed(const Step& step, const CutShape& shape) {
  Step rest;
  for (std::size_t b = 0; b < step.kv_lens.size(); ++b) {
    const std::int32_t tokens = step.new_tokens(b);
    rest.offsets.push_back(rest.offsets.back() + (is_streamed(shape, tokens) ? 0 : tokens));
    rest.kv_lens.push_back(step.kv_lens[b]);
  }
  return rest;
}

/// Cuts as the plan does, with the run of all.
void expect_the_plans_items(const AttendParams& params, const CutShape& shape, const Step& step,
                            const CutBounds& bounds) {
  const Step rest = without_streamed(step, shape);
  plan::Schedule expected;
  plan::make_schedule(rest.offsets, rest.kv_lens,
                      {.key_tile = shape.tile_keys,
                       .q_tile = shape.q_tile,
                       .num_kv_heads = shape.head_tiles,
                       .causal = params.causal,
                       .window_left = params.window_left,
                       .window_right = params.window_right,
                       .batch_invariant = params.batch_invariant},
                      expected);
  std::int64_t work = 0;
  for (std::size_t b = 0; b < step.kv_lens.size(); ++b)
    work += work_of(shape, step.new_tokens(b), step.kv_lens[b]);
  const std::int64_t run = run_length(shape, work);
  std::int64_t items = 0;
  std::int64_t partials = 0;
  for (std::size_t b = 0; b < step.kv_lens.size(); ++b) {
    const Cut cut = cut_of(shape, step.new_tokens(b), step.kv_lens[b], run);
    items += cut.num_items;
    partials += cut.num_partial_rows;
    ASSERT_EQ(cut.num_splits, expected.num_splits[b]);
    ASSERT_EQ(items, expected.item_offsets[b + 1]);
    ASSERT_EQ(partials, expected.partial_offsets[b + 1]);
    if (cut.num_items > 0) {
      ASSERT_EQ(cut.split_tiles, expected.split_tiles[b]);
    }
  }
  ASSERT_LE(items, bounds.num_items);
  ASSERT_LE(partials, bounds.num_partial_rows);
}

/// Slots are as equal as can be; pieces that share a sequence agree on it, and no two of them write
/// to one place.
void expect_even_slots(const CutShape& shape, const Step& step, std::int32_t most_slots,
                       const CutBounds& bounds) {
  std::int32_t units = 0;
  std::set<std::int32_t> kinds;
  for (std::size_t b = 0; b < step.kv_lens.size(); ++b) {
    const std::int32_t own = units_of(shape, step.new_tokens(b), step.kv_lens[b]);
    units += own * shape.head_tiles;
    if (own > 0) kinds.insert(own);
  }
  const auto most = static_cast<std::uint32_t>(std::clamp(bounds.num_slots, 1, most_slots));
  const Slots slots = slots_of(units, divider_of(most), kinds.size() == 1 ? *kinds.begin() : 0);
  ASSERT_EQ(slots.units, units);
  ASSERT_LE(slots.count, bounds.num_slots);
  ASSERT_GE(std::int64_t{slots.count} * slots.run, units);
  if (units > 0) {
    ASSERT_LT(std::int64_t{slots.count - 1} * slots.run, units);
  }
  std::set<std::int32_t> places;
  std::set<std::int32_t> counters;
  std::int32_t begin = 0;
  for (std::size_t b = 0; b < step.kv_lens.size(); ++b) {
    const std::int32_t own = units_of(shape, step.new_tokens(b), step.kv_lens[b]);
    for (std::int32_t head_tile = 0; own > 0 && head_tile < shape.head_tiles; ++head_tile) {
      const Sharing sharing = sharing_of(begin, begin + own, slots.run);
      begin += own;
      if (sharing.num_parts == 1) continue;
      ASSERT_TRUE(counters.insert(sharing.first_slot).second);
      for (std::int32_t part = 0; part < sharing.num_parts; ++part) {
        const std::int32_t place = partial_of(sharing, part);
        ASSERT_TRUE(places.insert(place).second);
        ASSERT_LT(place, 2 * slots.count);
      }
    }
  }
  ASSERT_EQ(begin, units);
}

TEST(Flash2Cut, DealsEveryStepWithinItsBounds) {
  testkit::Random random(451);
  for (int i = 0; i < 3000; ++i) {
    const AttendParams params = random_params(random);
    const Step step = random_step(random);
    constexpr std::int32_t kDims[] = {64, 128, 256, 576};
    constexpr std::size_t kSmem[] = {kH200Smem, kA100Smem, kSmallSmem};
    const Instance instance = instance_of(kDims[i % 4], i % 7 * 10, kSmem[i % 3]);
    const StepMaxima maxima = maxima_of(step);
    const CutShape shape = cut_shape(params, instance, maxima);
    const std::int32_t most_slots = 132 * instance.blocks;
    const CutBounds bounds =
        cut_bounds(shape, maxima, most_slots,
                   tiling_of(params.num_q_heads, params.num_kv_heads, instance.rows).heads);
    expect_the_plans_items(params, shape, step, bounds);
    expect_even_slots(shape, step, most_slots, bounds);
    if (HasFatalFailure()) return;
  }
}

TEST(Flash2Cut, KeepsEqualSequencesWholeWhereThatCostsLittle) {
  const auto run_of = [](std::int32_t each, std::int32_t count, std::uint32_t most_slots) {
    return slots_of(each * count, divider_of(most_slots), each).run;
  };
  EXPECT_EQ(run_of(128, 512, 264), 256);  // two of them a slot: 256 slots of 264
  EXPECT_EQ(run_of(128, 128, 264), 64);   // half of one
  EXPECT_EQ(run_of(512, 8, 264), 16);     // a 32nd
  EXPECT_EQ(run_of(128, 160, 264), 78);   // would be 128
  EXPECT_EQ(slots_of(128 * 512, divider_of(264), 0).run, 249);  // of different lengths
}

TEST(Flash2Cut, TakesLittleWorkspaceForLongPrompts) {
  AttendParams params;
  params.num_q_heads = 32;
  params.num_kv_heads = 8;
  const Instance instance = instance_of(128, 128, kH200Smem);
  const StepMaxima maxima{256, 1 << 20, 1 << 20, 1 << 20};
  const CutBounds bounds =
      cut_bounds(cut_shape(params, instance, maxima), maxima, 132 * instance.blocks, 4);
  EXPECT_LE(bounds.num_partial_rows * params.num_q_heads, 2 * instance.rows * 256);
  EXPECT_LE(bounds.slot_rows * bounds.num_slots, instance.rows * 132 * instance.blocks);
}

TEST(Flash2Cut, RoomForMoreTokensIsRoomForFewer) {
  AttendParams params;
  params.num_kv_heads = 2;
  for (const std::int32_t widest : {64, 128, 256, 576}) {
    for (const std::int32_t group : {1, 3, 8, 40}) {
      params.num_q_heads = 2 * group;
      std::int64_t before = 0;
      for (std::int32_t tokens = 1; tokens <= 200; ++tokens) {
        const Instance instance = instance_of(widest, std::int64_t{tokens} * group, kH200Smem);
        const StepMaxima maxima{64, 64 * tokens, tokens, 8192};
        const CutBounds bounds =
            cut_bounds(cut_shape(params, instance, maxima), maxima, 132 * instance.blocks,
                       tiling_of(params.num_q_heads, 2, instance.rows).heads);
        const std::int64_t rows = slot_partial_rows(bounds, widest, 132, kH200Smem);
        ASSERT_GE(rows, before) << widest << " dims, " << tokens << " tokens of " << group;
        before = rows;
      }
    }
  }
}

TEST(Flash2Cut, PureDecodeHasNoItems) {
  AttendParams params;
  params.num_q_heads = 32;
  params.num_kv_heads = 8;
  const Instance instance = instance_of(128, 128, kH200Smem);
  const StepMaxima maxima{64, 64, 1, 8192};
  const CutBounds bounds =
      cut_bounds(cut_shape(params, instance, maxima), maxima, 132 * instance.blocks, 4);
  EXPECT_EQ(bounds.num_items, 0);
  EXPECT_EQ(bounds.num_slots, 132 * instance.blocks);
  EXPECT_EQ(bounds.slot_rows, 4);
}

TEST(Flash2Cut, StepsOfMoreUnitsThan32BitsHaveNoSlots) {
  AttendParams params;
  params.num_q_heads = params.num_kv_heads = 128;
  const Instance instance = instance_of(128, 128, kH200Smem);
  const StepMaxima maxima{10'000, 10'000, 1, 1 << 20};
  const CutShape shape = cut_shape(params, instance, maxima);
  EXPECT_FALSE(is_streamed(shape, 1));
  EXPECT_GE(cut_bounds(shape, maxima, 264, 1).num_items, 10'000);
}

TEST(Flash2Cut, DividesAsTheProcessorDoes) {
  testkit::Random random(452);
  for (int i = 0; i < 20000; ++i) {
    const auto any = [&](double most) {
      return static_cast<std::uint32_t>(std::exp2(random.uniform() * std::log2(most)));
    };
    const std::uint32_t by = i < 600 ? static_cast<std::uint32_t>(i) + 1 : any(2147483647.0);
    const std::uint32_t most = 0x7FFFFFFFU;
    for (const std::uint32_t value :
         {any(2147483647.0), by, by - 1, most / by * by, most / by * by - 1, most, 0U})
      ASSERT_EQ(divide(value, divider_of(by)), value / by) << value << " by " << by;
  }
}

TEST(Flash2Cut, PacksTheHeadsOfAGroup) {
  EXPECT_EQ(tiling_of(32, 8, 64).q_tile, 16);
  EXPECT_EQ(tiling_of(32, 8, 128).q_tile, 32);
  EXPECT_EQ(tiling_of(14, 2, 64).q_tile, 9);
  EXPECT_EQ(tiling_of(64, 1, 64).q_tile, 1);
  const Tiling wide = tiling_of(130, 1, 64);
  EXPECT_EQ(wide.tiles_per_group, 3);
  EXPECT_EQ(wide.heads, 44);
  EXPECT_EQ(wide.head_tiles, 3);
}

TEST(Flash2Cut, InstancesFitTheDevice) {
  EXPECT_EQ(instance_of(256, 128, kH200Smem).room, Room::Full);
  EXPECT_EQ(instance_of(256, 128, kSmallSmem).room, Room::Small);
  EXPECT_EQ(instance_of(136, 128, kA100Smem).room, Room::Small);
  EXPECT_EQ(instance_of(264, 1, kH200Smem).room, Room::Full);
  EXPECT_EQ(instance_of(576, 1, kA100Smem).room, Room::Medium);
  EXPECT_EQ(instance_of(576, 1, kSmallSmem).room, Room::Small);
  EXPECT_EQ(instance_of(264, 1, kH200Smem).dim, 512);
  EXPECT_EQ(instance_of(128, 128, kH200Smem).blocks, 2);
  EXPECT_EQ(instance_of(128, 128, kSmallSmem).blocks, 1);
  EXPECT_EQ(instance_of(8, 128, kH200Smem).dim, 64);
  EXPECT_EQ(instance_of(64, 16, kH200Smem).blocks, 4);
  EXPECT_EQ(instance_of(128, 16, kSmallSmem).blocks, 1);
  EXPECT_EQ(instance_of(128, 17, kH200Smem).rows, 32);
  EXPECT_EQ(instance_of(128, 33, kH200Smem).rows, 128);
}

TEST(Flash2Cut, AddsManyPartsInGroups) {
  for (std::int32_t parts = 1; parts <= kernels::flash2::kMaxSlots; ++parts) {
    EXPECT_EQ(parts_of_group(parts, 1), parts);  // little: at once
    const std::int32_t group = parts_of_group(parts, 0x8000);
    if (parts <= 8) {
      EXPECT_EQ(group, parts);
      continue;
    }
    // No counter is taken twice, and neither step adds much more than the square root.
    EXPECT_GE(group, 4);
    EXPECT_LT(group, 2 * std::ceil(std::sqrt(parts)) + 1);
    EXPECT_LE((parts + group - 1) / group, group);
  }
}

}  // namespace
}  // namespace octavo::gpu_tests
