// SPDX-License-Identifier: Apache-2.0
// The backend flash2 against the oracle, and its bits against themselves: whatever the cache, the
// page size and the batch.
#include "testing/case_file.h"
#include "tests/gpu/flash2_lines.h"
#include "tests/gpu/gpu_test.h"

#include <octavo/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <tuple>

namespace octavo::gpu_tests {
namespace {

using conformance::expect_pass;
using conformance::expect_same_bits;
using ::testing::Combine;
using ::testing::HasSubstr;
using ::testing::Values;
using ::testing::ValuesIn;
using testkit::Case;
using testkit::make_case;
using testkit::parse_spec;
using testkit::ReplayOptions;
using testkit::ReplayResult;
using testkit::Verdict;

ReplayOptions by_flash2() {
  ReplayOptions options;
  options.backend = Backend::Flash2;
  options.device = kGpu;
  return options;
}

/// Skips on GPUs before sm80.
template <typename ParamT>
class Flash2Test : public GpuTestWith<ParamT> {
 protected:
  void SetUp() override {
    GpuTestWith<ParamT>::SetUp();
    if (!this->IsSkipped() && !this->HasFatalFailure()) require_backend(Backend::Flash2);
  }
};

class GpuFlash2 : public Flash2Test<std::tuple<CacheKind, std::string>> {
 protected:
  static ReplayOptions options() {
    ReplayOptions options = by_flash2();
    options.kind = std::get<0>(GetParam());
    return options;
  }
  static Case value() { return make_case(parse_spec(std::get<1>(GetParam()))); }
};

std::string flash2_name(const ::testing::TestParamInfo<GpuFlash2::ParamType>& tested) {
  const auto& [kind, line] = tested.param;
  return conformance::test_name(std::string(to_string(kind)) + "_" + line);
}

TEST_P(GpuFlash2, AgreesWithTheOracle) { expect_pass(value(), options()); }

TEST_P(GpuFlash2, AgreesWithTheOracleOverACallersCache) {
  ReplayOptions callers = options();
  callers.callers_cache = true;
  expect_pass(value(), callers);
}

TEST_P(GpuFlash2, GivesTheSameBitsTwice) { expect_same_bits(value(), options(), options()); }

INSTANTIATE_TEST_SUITE_P(Flash2, GpuFlash2,
                         Combine(Values(CacheKind::Paged, CacheKind::Contiguous),
                                 ValuesIn(flash2_lines())),
                         flash2_name);

class GpuFlash2Bits : public Flash2Test<std::string> {};

std::string line_name(const ::testing::TestParamInfo<std::string>& tested) {
  return conformance::test_name(tested.param);
}

TEST_P(GpuFlash2Bits, ArePagedAndContiguousTheSame) {
  ReplayOptions contiguous = by_flash2();
  contiguous.kind = CacheKind::Contiguous;
  expect_same_bits(make_case(parse_spec(GetParam())), by_flash2(), contiguous);
}

TEST_P(GpuFlash2Bits, DoNotShowThePageSize) {
  const Case value = make_case(parse_spec(GetParam()));
  for (const std::int32_t page_size : {1, 3, 16, 64, 256}) {
    SCOPED_TRACE(page_size);
    ReplayOptions other = by_flash2();
    other.page_size = page_size;
    other.scramble = 5;
    expect_same_bits(value, by_flash2(), other);
  }
}

INSTANTIATE_TEST_SUITE_P(Flash2, GpuFlash2Bits, ValuesIn(flash2_lines()), line_name);

class GpuFlash2Repeats : public Flash2Test<std::string> {};

TEST_P(GpuFlash2Repeats, GiveTheSameBitsAThousandTimes) {
  const Case value = make_case(parse_spec(GetParam()));
  ReplayOptions keeps = by_flash2();
  keeps.keep_outputs = true;
  const ReplayResult first = replay(value, keeps);
  ASSERT_EQ(first.verdict, Verdict::Pass) << first.reason;
  for (int i = 0; i < 1000; ++i) {
    const ReplayResult again = replay(value, keeps);
    ASSERT_TRUE(again.outs == first.outs && again.lses == first.lses) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Flash2, GpuFlash2Repeats,
                         Values("b3 q2 s700 steps2 hq8 hkv2 d128 p16 bf16 seed421",
                                "b1 q40 s90 steps1 hq3 hkv1 d256 p3 f16 seed422",
                                "b2 q2 s90 steps2 hq5 hkv1 d576 dv512 p16 bf16 seed423"),
                         line_name);

class GpuFlash2Batch : public Flash2Test<std::string> {};

TEST_P(GpuFlash2Batch, MatesDoNotShowInInvariantMode) {
  const Case value = make_case(parse_spec(GetParam()));
  ReplayOptions keeps = by_flash2();
  keeps.batch_invariant = true;
  keeps.keep_outputs = true;
  const ReplayResult together = replay(value, keeps);
  ASSERT_EQ(together.verdict, Verdict::Pass) << together.reason;
  for (std::size_t b = 0; b < value.steps[0].sequences.size(); ++b) {
    const Case alone = conformance::select_rows(value, {b});
    const ReplayResult own = replay(alone, keeps);
    ASSERT_EQ(own.verdict, Verdict::Pass) << own.reason;
    for (std::size_t i = 0; i < value.steps.size(); ++i) {
      EXPECT_EQ(conformance::rows_of(value, i, b, together.outs[i]),
                conformance::rows_of(alone, i, 0, own.outs[i]));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Flash2, GpuFlash2Batch,
                         Values("b4 q1 s800 steps3 hq4 hkv2 d64 p16 bf16 seed431",
                                "b2 q9 s600 steps2 hq3 hkv1 d128 p7 f16 seed432",
                                "b3 q2 s300 steps2 hq5 hkv1 d576 dv512 p16 bf16 seed433"),
                         line_name);

/// The kernels of GPUs whose blocks may have less shared memory.
class GpuFlash2OfSmallerGpus : public Flash2Test<std::tuple<const char*, std::string>> {
 protected:
  void SetUp() override {
    Flash2Test::SetUp();
    setenv("OCTAVO_BLOCK_SMEM_KB", std::get<0>(GetParam()), 1);
  }
  void TearDown() override { unsetenv("OCTAVO_BLOCK_SMEM_KB"); }
  static Case value() { return make_case(parse_spec(std::get<1>(GetParam()))); }
};

std::string smaller_name(
    const ::testing::TestParamInfo<GpuFlash2OfSmallerGpus::ParamType>& tested) {
  const auto& [kilobytes, line] = tested.param;
  return conformance::test_name(std::string(kilobytes) + "KB_" + line);
}

TEST_P(GpuFlash2OfSmallerGpus, AgreeWithTheOracle) {
  for (const bool callers_cache : {false, true}) {
    ReplayOptions options = by_flash2();
    options.callers_cache = callers_cache;
    expect_pass(value(), options);
  }
}

TEST_P(GpuFlash2OfSmallerGpus, GiveTheSameBitsWhateverTheCache) {
  ReplayOptions contiguous = by_flash2();
  contiguous.kind = CacheKind::Contiguous;
  expect_same_bits(value(), by_flash2(), contiguous);
  ReplayOptions scrambled = by_flash2();
  scrambled.page_size = 3;
  scrambled.scramble = 5;
  expect_same_bits(value(), by_flash2(), scrambled);
}

INSTANTIATE_TEST_SUITE_P(
    Flash2, GpuFlash2OfSmallerGpus,
    Combine(Values("99", "163"),
            Values("b2 q33 s127 steps2 hq12 hkv1 d128 p16 bf16 seed404",
                   "b3 q1 s65 steps3 hq14 hkv2 d256 p7 bf16 seed403",
                   "b2 q17 s129 steps2 hq14 hkv1 d256 dv64 p3 f16 sbhd seed406",
                   "b2 q65 s90 steps2 hq4 hkv4 d192 p64 bf16 bshd seed451",
                   "b1 q40 s900 steps2 hq6 hkv1 d256 p16 f16 cap5 sinks alibi seed452",
                   "b4 q30 s30 steps12 hq3 hkv1 d256 p4 bf16 life w50,0 seed453",
                   "b1 q1 s70 steps2 hq128 hkv1 d576 dv512 p16 bf16 seed454",
                   "b2 q9 s65 steps2 hq5 hkv1 d264 p3 bf16 sbhd seed463",
                   "b2 q20 s31 steps2 hq12 hkv2 d512 p7 f16 full w20,5 cap10 sinks alibi seed464",
                   "b1 q33 s200 steps2 hq3 hkv1 d320 dv8 p16 f16 bshd seed465",
                   "b2 q2 s70 steps2 hq4 hkv2 d72 dv320 p5 bf16 seed466",
                   "b1 q1 s1300 steps3 hq3 hkv1 d576 dv512 p64 bf16 sinks seed467")),
    smaller_name);

class GpuFlash2Refusal : public Flash2Test<std::string> {};

TEST_P(GpuFlash2Refusal, SaysWhatIsMissing) {
  const ReplayResult result = replay(make_case(parse_spec(GetParam())), by_flash2());
  EXPECT_EQ(result.verdict, Verdict::Refused);
  EXPECT_THAT(result.reason, HasSubstr("backend flash2"));
}

INSTANTIATE_TEST_SUITE_P(Flash2, GpuFlash2Refusal,
                         Values("b1 q1 s20 hq2 hkv1 d64 f32 seed441",
                                "b1 q1 s20 hq2 hkv1 d36 bf16 seed442",
                                "b1 q1 s20 hq2 hkv1 d576 f16 seed443",
                                "b1 q1 s20 hq2 hkv1 d64 dv20 f16 seed444"),
                         line_name);

}  // namespace
}  // namespace octavo::gpu_tests
