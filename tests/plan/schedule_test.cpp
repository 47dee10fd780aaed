// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule.h"
#include "plan/step_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace octavo::plan {
namespace {

constexpr ScheduleShape kShape{.key_tile = 64, .q_tile = 16, .num_kv_heads = 8};

struct Lengths {
  std::vector<std::int32_t> new_tokens;
  std::vector<std::int32_t> kv_lens;
};

Schedule schedule_of(const Lengths& lengths, const ScheduleShape& shape) {
  std::vector<std::int32_t> offsets(lengths.new_tokens.size() + 1, 0);
  std::partial_sum(lengths.new_tokens.begin(), lengths.new_tokens.end(), offsets.begin() + 1);
  Schedule schedule;
  make_schedule(offsets, lengths.kv_lens, shape, schedule);
  return schedule;
}

std::int32_t tiles_of(std::int32_t kv_len) { return (kv_len + 63) / 64; }

TEST(Schedule, OneLongSequenceBesideEmptyOnesUsesAllCores) {
  Lengths lengths{std::vector<std::int32_t>(1024, 0), std::vector<std::int32_t>(1024, 0)};
  lengths.new_tokens[500] = 1;
  lengths.kv_lens[500] = 500'000;
  const Schedule schedule = schedule_of(lengths, kShape);
  EXPECT_EQ(schedule.num_items(), schedule.num_splits[500]);  // the empty ones cost nothing
  EXPECT_GE(schedule.num_items() * kShape.num_kv_heads, kTargetItems * 9 / 10);
  EXPECT_LE(schedule.num_items() * kShape.num_kv_heads, kTargetItems);
}

TEST(Schedule, OneLongSequenceBesideOneTokenOnesStaysBalanced) {
  Lengths lengths{std::vector<std::int32_t>(1024, 1), std::vector<std::int32_t>(1024, 1)};
  lengths.kv_lens[0] = 500'000;
  const Schedule schedule = schedule_of(lengths, kShape);
  const std::int64_t share = (tiles_of(500'000) + 1023) * kShape.num_kv_heads / kTargetItems;
  EXPECT_LE(schedule.split_tiles[0], share + 1);
  EXPECT_EQ(1, schedule.num_splits[1]);
}

TEST(Schedule, ASplitHoldsTheSameWorkInEverySequence) {
  const Schedule schedule = schedule_of({{1, 1, 1}, {100'000, 50'000, 25'000}}, kShape);
  const std::int64_t common_run =
      (tiles_of(100'000) + tiles_of(50'000) + tiles_of(25'000)) * 8 / kTargetItems + 1;
  for (const std::int32_t run : schedule.split_tiles) {
    EXPECT_LE(run, common_run);
    EXPECT_GE(run, common_run * 9 / 10);  // evened within its sequence
  }
}

TEST(Schedule, SplitsCoverEveryTileOnce) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    Lengths lengths;
    const auto num_seqs = 1 + random() % 6;
    for (std::size_t b = 0; b < num_seqs; ++b) {
      lengths.new_tokens.push_back(static_cast<std::int32_t>(random() % 70));
      lengths.kv_lens.push_back(lengths.new_tokens.back() +
                                static_cast<std::int32_t>(random() % 40'000));
    }
    const Schedule schedule = schedule_of(lengths, kShape);
    for (std::size_t b = 0; b < num_seqs; ++b) {
      const std::int64_t reach = std::int64_t{schedule.num_splits[b]} * schedule.split_tiles[b];
      if (lengths.new_tokens[b] == 0) {
        ASSERT_EQ(0, schedule.num_splits[b]);
        continue;
      }
      ASSERT_GE(reach, tiles_of(lengths.kv_lens[b]));
      ASSERT_LT(reach - schedule.split_tiles[b],
                std::max(tiles_of(lengths.kv_lens[b]), 1));  // no split is empty
    }
  }
}

TEST(Schedule, PartialsAreBoundedWhateverTheLengths) {
  std::mt19937 random(11);
  for (int round = 0; round < 2000; ++round) {
    Lengths lengths;
    const auto num_seqs = 1 + random() % 64;
    for (std::size_t b = 0; b < num_seqs; ++b) {
      lengths.new_tokens.push_back(
          static_cast<std::int32_t>(random() % 3 == 0 ? random() % 4096 : 1));
      lengths.kv_lens.push_back(lengths.new_tokens.back() +
                                static_cast<std::int32_t>(random() % 200'000));
    }
    const Schedule schedule = schedule_of(lengths, kShape);
    // Every split item but one a q tile covers more than half a common run, and there are
    // kTargetItems runs.
    ASSERT_LE(schedule.num_partial_rows(), 2 * kTargetItems / kShape.num_kv_heads * kShape.q_tile);
  }
}

TEST(Schedule, ShortSequencesAreNotSplit) {
  const Schedule schedule = schedule_of({{1}, {kMinSplitTiles * 64}}, kShape);
  EXPECT_EQ(1, schedule.num_splits[0]);
  EXPECT_EQ(0, schedule.num_partial_rows());
}

TEST(Schedule, AWindowBoundsTheTiles) {
  ScheduleShape shape = kShape;
  shape.window_left = 128;
  EXPECT_EQ(1, schedule_of({{1}, {500'000}}, shape).num_splits[0]);
  // 128 keys before the query and itself touch at most three tiles of 64, wherever they start.
  EXPECT_EQ(3, max_visible_tiles(1, 500'000, shape));
}

TEST(Schedule, AHugeWindowIsNoWindow) {
  ScheduleShape shape = kShape;
  shape.window_left = INT64_MAX;
  shape.window_right = INT64_MAX;
  shape.causal = false;
  EXPECT_EQ(tiles_of(500'000), max_visible_tiles(1, 500'000, shape));
}

TEST(Schedule, NoQTileSeesMoreTilesThanTheBound) {
  std::mt19937 random(3);
  for (int round = 0; round < 5000; ++round) {
    ScheduleShape shape = kShape;
    shape.causal = random() % 2 == 0;
    shape.window_left = static_cast<std::int64_t>(random() % 300) - 1;
    shape.window_right = static_cast<std::int64_t>(random() % 100) - 1;
    const auto num_new = static_cast<std::int32_t>(1 + random() % 200);
    const auto kv_len = num_new + static_cast<std::int32_t>(random() % 900);
    const std::int64_t bound = max_visible_tiles(num_new, kv_len, shape);
    for (std::int32_t token = 0; token < num_new; token += shape.q_tile) {
      const std::int64_t first = kv_len - num_new + token;
      const std::int64_t last = std::min<std::int64_t>(first + shape.q_tile, kv_len) - 1;
      const std::int64_t begin =
          shape.window_left < 0 ? 0 : std::max<std::int64_t>(0, first - shape.window_left);
      std::int64_t end = shape.causal ? last + 1 : kv_len;
      if (shape.window_right >= 0) end = std::min(end, last + shape.window_right + 1);
      end = std::min<std::int64_t>(end, kv_len);
      ASSERT_LE((end + 63) / 64 - begin / 64, bound);
    }
  }
}

TEST(Schedule, BatchInvariantModeForgetsTheBatchMates) {
  ScheduleShape shape = kShape;
  shape.batch_invariant = true;
  const Schedule alone = schedule_of({{1}, {70'000}}, shape);
  const Schedule among = schedule_of({{1, 4096, 1}, {500'000, 4096, 70'000}}, shape);
  EXPECT_EQ(alone.split_tiles[0], among.split_tiles[2]);
  EXPECT_EQ(alone.num_splits[0], among.num_splits[2]);
}

TEST(TurnSet, FillsOnceForEachRotationAndForgetsThemAll) {
  TurnSet set;
  int fills = 0;
  const auto get = [&](std::int32_t rotary_dim, double base) {
    return set.get(rotary_dim, base, 4, [&](float* values) {
      for (int i = 0; i < 4; ++i) values[i] = static_cast<float>(rotary_dim + i);
      ++fills;
    });
  };
  const float first = get(8, 1e4)[1];
  EXPECT_EQ(first, 9.0F);
  EXPECT_EQ(get(16, 1e4)[0], 16.0F);
  EXPECT_EQ(get(8, 1e5)[0], 8.0F);
  EXPECT_EQ(get(8, 1e4)[1], first);
  EXPECT_EQ(fills, 3);
  set.clear();
  get(8, 1e4);
  EXPECT_EQ(fills, 4);
}

TEST(ScheduleSet, MakesOneScheduleForEachShapeAndForgetsThemAll) {
  const std::vector<std::int32_t> offsets{0, 1};
  const std::vector<std::int32_t> short_len{100};
  const std::vector<std::int32_t> long_len{100'000};
  ScheduleSet set;
  const std::int32_t before = set.get(offsets, short_len, kShape).num_splits[0];
  set.clear();
  EXPECT_GT(set.get(offsets, long_len, kShape).num_splits[0], before);
}

}  // namespace
}  // namespace octavo::plan
