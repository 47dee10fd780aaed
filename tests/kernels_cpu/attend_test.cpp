// SPDX-License-Identifier: Apache-2.0
// Both CPU attentions against the float64 oracle.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels_cpu/problem.h"

namespace octavo::test {
namespace {

struct Named {
  const char* name;
  Problem problem;
};

// GoogleTest looks for this name.  NOLINTNEXTLINE(readability-identifier-naming)
void PrintTo(const Named& named, std::ostream* to) { *to << named.name; }

// A mixed batch: prefill, decode, a chunk, an idle sequence, a speculative step.
std::vector<Lengths> mixed() { return {{70, 70}, {200, 1}, {131, 40}, {9, 0}, {64, 4}, {1, 1}}; }

Problem with_dims(std::int32_t dim, std::int32_t dim_v, std::int32_t q_heads = 4,
                  std::int32_t kv_heads = 2) {
  Problem p;
  p.sequences = mixed();
  p.head_dim = dim;
  p.head_dim_v = dim_v;
  p.num_q_heads = q_heads;
  p.num_kv_heads = kv_heads;
  return p;
}

std::vector<Named> problems() {
  std::vector<Named> all;
  const auto add = [&](const char* name, const Problem& base, auto change) {
    Problem p = base;
    change(p);
    all.push_back({name, p});
  };
  const auto as_is = [](Problem&) {};
  const Problem plain = with_dims(64, 64);
  add("dim1", with_dims(1, 1), as_is);
  add("dim3", with_dims(3, 3), as_is);
  add("dim7", with_dims(7, 5), as_is);
  add("dim8", with_dims(8, 8), as_is);
  add("dim64", plain, as_is);
  add("dim80", with_dims(80, 80), as_is);
  add("dim96", with_dims(96, 96), as_is);
  add("dim128", with_dims(128, 128), as_is);
  add("dim192_128", with_dims(192, 128), as_is);
  add("dim64_100", with_dims(64, 100), as_is);
  add("dim256", with_dims(256, 256), as_is);
  add("dim576_512", with_dims(576, 512, 2, 1), as_is);
  add("dim576_576", with_dims(576, 576, 2, 1), as_is);
  add("group1", with_dims(32, 32, 3, 3), as_is);
  add("group3", with_dims(64, 64, 9, 3), as_is);
  add("group7", with_dims(32, 32, 7, 1), as_is);
  add("group8", with_dims(32, 32, 8, 1), as_is);
  add("group12", with_dims(32, 32, 24, 2), as_is);
  add("group17", with_dims(16, 16, 17, 1), as_is);
  add("group200", with_dims(8, 8, 200, 1), as_is);
  add("bshd", plain, [](Problem& p) { p.format = TensorFormat::Bshd; });
  add("sbhd", plain, [](Problem& p) { p.format = TensorFormat::Sbhd; });
  add("full", plain, [](Problem& p) { p.causal = false; });
  add("window_left", plain, [](Problem& p) { p.window = {20, -1}; });
  add("window_zero", plain, [](Problem& p) { p.window = {0, 0}; });
  add("window_both_full", plain, [](Problem& p) {
    p.causal = false;
    p.window = {8, 5};
  });
  add("window_right_full", plain, [](Problem& p) {
    p.causal = false;
    p.window = {-1, 70};
  });
  // Prompts whose first and last row of a query tile see nothing of the key tile between them.
  add("window_within_a_prompt", with_dims(16, 16, 2, 2), [](Problem& p) {
    p.window = {2, -1};
    p.sequences = {{155, 150}, {400, 400}};
  });
  add("window_within_a_prompt_full", with_dims(16, 16, 4, 2), [](Problem& p) {
    p.causal = false;
    p.window = {1, 1};
    p.sequences = {{300, 238}};
  });
  add("softcap", plain, [](Problem& p) {
    p.softcap = 20.0F;
    p.magnitude = 2.0;
  });
  add("alibi", plain, [](Problem& p) { p.alibi = true; });
  add("sinks", plain, [](Problem& p) { p.sinks = true; });
  add("scale", plain, [](Problem& p) { p.scale = 0.3F; });
  add("negative_scale", plain, [](Problem& p) { p.scale = -0.2F; });
  add("everything", plain, [](Problem& p) {
    p.causal = false;
    p.window = {100, 3};
    p.softcap = 5.0F;
    p.alibi = true;
    p.sinks = true;
    p.rope = Rope{};
    p.split_tiles = 1;
  });
  add("rope_half", plain, [](Problem& p) { p.rope = Rope{}; });
  add("rope_interleaved_partial", plain, [](Problem& p) {
    p.rope = Rope{.style = RopeStyle::Interleaved, .rotary_dim = 32, .base = 500.0};
  });
  add("contiguous", plain, [](Problem& p) { p.page_size = 0; });
  add("page1", plain, [](Problem& p) { p.page_size = 1; });
  add("page7", plain, [](Problem& p) { p.page_size = 7; });
  add("splits", plain, [](Problem& p) { p.split_tiles = 1; });
  add("splits_wide_values", with_dims(16, 100), [](Problem& p) { p.split_tiles = 1; });
  add("splits_window", plain, [](Problem& p) {
    p.split_tiles = 1;
    p.window = {90, -1};
  });
  add("no_keys", plain, [](Problem& p) { p.sequences = {{0, 3}, {0, 0}, {2, 5}}; });
  add("no_sequences", plain, [](Problem& p) { p.sequences = {}; });
  add("no_keys_full", plain, [](Problem& p) {
    p.causal = false;
    p.sequences = {{0, 3}, {0, 0}, {2, 5}};
  });
  // Decodes of slots of 2 kB and more, whose heads are walked in runs: several tiles, splits, units
  // that follow each other, rows that see parts of tiles, and a V wider than K.
  const auto decodes = [](Problem& p) { p.sequences = {{300, 1}, {70, 2}, {641, 1}, {5, 2}}; };
  add("long_slots", with_dims(80, 80, 16, 8), decodes);
  add("long_slots_wide_values", with_dims(80, 100, 12, 12), decodes);
  add("long_slots_window", with_dims(128, 128, 16, 8), [&](Problem& p) {
    decodes(p);
    p.window = {130, -1};
  });
  add("long_slots_splits", with_dims(128, 128, 16, 8), [&](Problem& p) {
    decodes(p);
    p.split_tiles = 2;
  });
  add("short_slots_splits", with_dims(64, 64, 9, 3), [&](Problem& p) {
    decodes(p);
    p.split_tiles = 2;
    p.window = {200, -1};
  });
  add("long", with_dims(64, 64, 6, 2), [](Problem& p) {
    p.sequences = {{8192, 1}, {5000, 3}};
    p.split_tiles = 20;
  });
  add("long_unsplit", with_dims(128, 128, 2, 1), [](Problem& p) { p.sequences = {{8192, 1}}; });
  add("long_packed", with_dims(128, 128, 2, 1), [](Problem& p) { p.sequences = {{8192, 10}}; });
  return all;
}

class AttendTest : public testing::TestWithParam<Named> {};

TEST_P(AttendTest, UnfusedAgreesWithTheOracle) {
  const Problem& p = GetParam().problem;
  EXPECT_EQ(difference(run(p, Kernel::Unfused), expected(p)), "");
}

TEST_P(AttendTest, CpuAgreesWithTheOracle) {
  const Problem& p = GetParam().problem;
  EXPECT_EQ(difference(run(p, Kernel::Cpu), expected(p)), "");
}

// Half-precision caches are widened exactly: the tolerance stays that of float32.
TEST_P(AttendTest, CpuReadsBf16) {
  Problem p = GetParam().problem;
  p.kv_dtype = DType::BF16;
  p.q_dtype = DType::BF16;
  EXPECT_EQ(difference(run(p, Kernel::Cpu), expected(p)), "");
}

TEST_P(AttendTest, CpuReadsF16) {
  Problem p = GetParam().problem;
  p.kv_dtype = DType::F16;
  p.q_dtype = DType::F16;
  EXPECT_EQ(difference(run(p, Kernel::Cpu), expected(p)), "");
}

TEST_P(AttendTest, UnfusedReadsF16AndBf16Queries) {
  Problem p = GetParam().problem;
  p.kv_dtype = DType::F16;
  p.q_dtype = DType::BF16;
  EXPECT_EQ(difference(run(p, Kernel::Unfused), expected(p)), "");
}

TEST_P(AttendTest, CpuGivesTheSameBitsForAnyPageSizeAndThreads) {
  Problem p = GetParam().problem;
  p.kv_dtype = DType::BF16;
  p.page_size = 16;
  p.num_threads = 1;
  const Answer reference = run(p, Kernel::Cpu);
  for (const std::int32_t page_size : {0, 1, 2, 3, 7, 64, 256}) {
    p.page_size = page_size;
    p.num_threads = 1 + page_size % 3;
    EXPECT_TRUE(same_bits(run(p, Kernel::Cpu), reference)) << "page size " << page_size;
  }
}

// Rows of a sequence come out alike whether its tokens came at once or in chunks, as long as the
// chunks take the same way (see kDirectRows).
TEST(Attend, GivesTheSameBitsForChunksAsForTheWhole) {
  Problem whole;
  whole.sequences = {{300, 300}};
  whole.head_dim = whole.head_dim_v = 40;
  const Answer all = run(whole, Kernel::Cpu);

  // The chunk's queries are the whole's last ones, over the same keys.
  Problem chunk = whole;
  chunk.sequences = {{300, 37}};
  chunk.skip_query_tokens = 263;
  const Answer last = run(chunk, Kernel::Cpu);
  const Answer wanted{
      {all.out.end() - static_cast<std::ptrdiff_t>(last.out.size()), all.out.end()},
      {all.lse.end() - static_cast<std::ptrdiff_t>(last.lse.size()), all.lse.end()}};
  EXPECT_TRUE(same_bits(last, wanted));
}

TEST(Attend, HoldsForLogitsOfThousands) {
  Problem p;
  p.sequences = {{90, 90}, {300, 1}};
  p.num_q_heads = 4;
  p.num_kv_heads = 2;
  p.head_dim = p.head_dim_v = 64;
  p.magnitude = 30.0;
  // Logits this large are themselves 1e-3 off in float32.
  EXPECT_EQ(difference(run(p, Kernel::Cpu), expected(p), 2e-2, 4e-3), "");
  EXPECT_EQ(difference(run(p, Kernel::Unfused), expected(p)), "");
}

TEST(Attend, WritesHalfPrecisionOutputs) {
  for (const DType dtype : {DType::F16, DType::BF16}) {
    Problem p;
    p.sequences = {{20, 20}, {70, 1}};
    const Answer exact = expected(p);
    p.out_dtype = dtype;
    const double ulp = dtype == DType::F16 ? 1e-3 : 8e-3;
    EXPECT_EQ(difference(run(p, Kernel::Cpu), exact, ulp, ulp), "");
    EXPECT_EQ(difference(run(p, Kernel::Unfused), exact, ulp, ulp), "");
  }
}

// A NaN that a row sees may show in it, but in no other row.
TEST(Attend, KeepsNanToTheRowsThatSeeIt) {
  for (const std::int32_t new_tokens : {4, 40}) {
    for (const Kernel kernel : {Kernel::Cpu, Kernel::Unfused}) {
      Problem p;
      p.sequences = {{40, new_tokens}};
      const Answer clean = run(p, kernel);
      p.nan_value_key = 38;
      const Answer dirty = run(p, kernel);
      const std::size_t row = static_cast<std::size_t>(p.num_q_heads) * 16;
      const std::size_t before = clean.out.size() - 2 * row;
      for (std::size_t i = 0; i < clean.out.size(); ++i) {
        if (i < before) {
          ASSERT_EQ(dirty.out[i], clean.out[i]);
        } else {
          ASSERT_TRUE(std::isnan(dirty.out[i]));
        }
      }
    }
  }
}

TEST(Attend, IsSafeInsideAParallelRegion) {
  Problem p;
  p.sequences = {{100, 30}, {200, 1}};
  p.split_tiles = 1;
  const Answer reference = run(p, Kernel::Cpu);
  int same = 0;
#pragma omp parallel num_threads(3) reduction(+ : same)
  same += same_bits(run(p, Kernel::Cpu), reference) ? 1 : 0;
  EXPECT_EQ(same, 3);
}

TEST(Attend, TakesExplicitPositionsForRopeAlone) {
  Problem p;
  p.sequences = {{30, 6}};
  p.rope = Rope{};
  p.rope_positions = {5, 9, 100, 0, 3, 70000};
  EXPECT_EQ(difference(run(p, Kernel::Cpu), expected(p)), "");
  EXPECT_EQ(difference(run(p, Kernel::Unfused), expected(p)), "");
}

TEST(Attend, TakesNoRoomForAnglesThatTheStepHas) {
  kernels::AttendParams params;
  params.batch.num_tokens = 100;
  params.num_q_heads = params.num_kv_heads = 1;
  params.head_dim = params.head_dim_v = 64;
  params.rope.rotary_dim = 64;
  const kernels::SplitSchedule schedule{.key_tile = kernels::cpu::kKeyTile,
                                        .q_tile = kernels::cpu::q_tile_tokens(1)};
  const float turns = 0.0F;
  EXPECT_EQ(kernels::cpu::attend_workspace_bytes(params, schedule, 1) -
                kernels::cpu::attend_workspace_bytes(params, schedule, 1, &turns),
            sizeof(float) * 100 * 64);
}

INSTANTIATE_TEST_SUITE_P(All, AttendTest, testing::ValuesIn(problems()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace octavo::test
