// SPDX-License-Identifier: Apache-2.0
// Every instruction set that is built and runs here, not just the best one; and the widening of
// half-precision values, all of them.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "base/convert.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/targets.h"
#include "kernels_cpu/problem.h"
// After targets.h, which says what is built.
#include <hwy/targets.h>

namespace octavo::test {
namespace {

class TargetTest : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    if ((hwy::SupportedTargets() & GetParam()) == 0) GTEST_SKIP() << "not of this machine";
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    ASSERT_EQ(std::string(kernels::cpu::target_name()), hwy::TargetName(GetParam()));
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

Problem base_problem() {
  Problem p;
  p.sequences = {{70, 70}, {200, 1}, {131, 40}, {64, 4}};
  p.num_q_heads = 6;
  p.num_kv_heads = 2;
  p.head_dim = 72;
  p.head_dim_v = 45;
  return p;
}

TEST_P(TargetTest, AgreesWithTheOracle) {
  const Problem p = base_problem();
  EXPECT_EQ(difference(run(p, Kernel::Cpu), expected(p)), "");
}

TEST_P(TargetTest, AgreesWithTheOracleWithEveryFeature) {
  Problem p = base_problem();
  p.kv_dtype = DType::F16;
  p.window = {90, -1};
  p.softcap = 15.0F;
  p.alibi = true;
  p.sinks = true;
  p.split_tiles = 1;
  EXPECT_EQ(difference(run(p, Kernel::Cpu), expected(p)), "");
}

constexpr std::int32_t kHeads = 128, kDim = 512;
constexpr std::size_t kValues = std::size_t{kHeads} * kDim;

// A single visible key has weight 1: the output is its value, exactly. `v` and each token of `out`
// have kValues elements.
void attend_one_key(DType dtype, void* v, DType out_dtype, void* out, std::int32_t new_tokens) {
  std::vector<float> k(kHeads, 0.0F);  // of any dtype
  const std::vector<float> q(static_cast<std::size_t>(new_tokens) * kHeads, 1.0F);
  const std::vector<std::int32_t> offsets = {0, new_tokens}, lens = {1}, tiles = {1}, splits = {1};
  const std::vector<std::int64_t> items = {0, 1}, partials = {0, 0};
  kernels::AttendParams params;
  params.batch.num_seqs = 1;
  params.batch.num_tokens = new_tokens;
  params.batch.token_offsets = offsets.data();
  params.batch.kv_lens = lens.data();
  params.kv.k = {k.data(), kHeads, kHeads, 1, 1};
  params.kv.v = {v, kHeads * kDim, kHeads * kDim, kDim, 1};
  params.kv.dtype = dtype;
  params.kv.num_pages = 1;
  params.kv.page_size = 1;
  params.q = q.data();
  params.q_layout = {true, 0, kHeads, 1, 1, 0, new_tokens};
  params.out = out;
  params.out_dtype = out_dtype;
  params.out_layout = {true, 0, kHeads * kDim, kDim, 1, 0, new_tokens};
  params.num_q_heads = params.num_kv_heads = kHeads;
  params.head_dim = 1;
  params.head_dim_v = kDim;
  params.causal = false;
  params.num_threads = 1;
  const kernels::SplitSchedule schedule{kernels::cpu::kKeyTile,
                                        kernels::cpu::q_tile_tokens(1),
                                        1,
                                        0,
                                        items.data(),
                                        partials.data(),
                                        tiles.data(),
                                        splits.data()};
  std::vector<char> workspace(kernels::cpu::attend_workspace_bytes(params, schedule, 1));
  kernels::cpu::attend(params, schedule, workspace.data());
}

void expect_all_values(DType dtype, std::int32_t new_tokens) {
  std::vector<std::uint16_t> v(kValues);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<std::uint16_t>(i);
  std::vector<float> out(static_cast<std::size_t>(new_tokens) * v.size());
  attend_one_key(dtype, v.data(), DType::F32, out.data(), new_tokens);

  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint16_t bits = v[i % v.size()];
    const float wanted = dtype == DType::F16 ? base::f16_to_float(bits) : base::bf16_to_float(bits);
    if (std::isnan(wanted)) {
      ASSERT_TRUE(std::isnan(out[i])) << "bits " << bits;
    } else {
      ASSERT_EQ(out[i], wanted) << "bits " << bits;
    }
  }
}

// The upper half of a float counts up, the lower one is `low`: ties, what is just below and above.
void expect_all_roundings(DType out_dtype, std::uint32_t low) {
  std::vector<float> v(kValues);
  for (std::size_t i = 0; i < v.size(); ++i) {
    v[i] = std::bit_cast<float>(static_cast<std::uint32_t>(i) << 16U | low);
  }
  std::vector<std::uint16_t> out(kValues);
  attend_one_key(DType::F32, v.data(), out_dtype, out.data(), 1);
  const bool f16 = out_dtype == DType::F16;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (std::isnan(v[i])) {
      ASSERT_TRUE(std::isnan(f16 ? base::f16_to_float(out[i]) : base::bf16_to_float(out[i]))) << i;
      continue;
    }
    // -0 joins a sum of +0.
    const float value = v[i] == 0.0F ? 0.0F : v[i];
    ASSERT_EQ(out[i], f16 ? base::float_to_f16(value) : base::float_to_bf16(value)) << v[i];
  }
}

TEST_P(TargetTest, WidensEveryF16InPlace) { expect_all_values(DType::F16, 1); }
TEST_P(TargetTest, WidensEveryF16WhenPacking) { expect_all_values(DType::F16, 20); }
TEST_P(TargetTest, WidensEveryBf16InPlace) { expect_all_values(DType::BF16, 1); }
TEST_P(TargetTest, WidensEveryBf16WhenPacking) { expect_all_values(DType::BF16, 20); }

TEST_P(TargetTest, RoundsToF16) {
  for (const std::uint32_t low : {0U, 0x1000U, 0x0FFFU, 0x1001U, 0x3000U}) {
    expect_all_roundings(DType::F16, low);
  }
}
TEST_P(TargetTest, RoundsToBf16) {
  for (const std::uint32_t low : {0U, 0x8000U, 0x7FFFU, 0x8001U}) {
    expect_all_roundings(DType::BF16, low);
  }
}

// The target that every machine has, and those that not all have.
#if HWY_ARCH_X86
const auto kTargets = testing::Values(HWY_STATIC_TARGET, HWY_AVX2, HWY_AVX3);
#else
const auto kTargets = testing::Values(HWY_STATIC_TARGET);
#endif

INSTANTIATE_TEST_SUITE_P(All, TargetTest, kTargets, [](const auto& target) {
  return std::string(hwy::TargetName(target.param));
});

}  // namespace
}  // namespace octavo::test
