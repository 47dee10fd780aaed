// SPDX-License-Identifier: Apache-2.0
// The conformance suite on GPU tensors: every line, every case file, against the oracle.
#include "tests/conformance/suite.h"
#include "testing/case_file.h"
#include "tests/gpu/gpu_test.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

namespace octavo::gpu_tests {
namespace {

using conformance::expect_pass;
using conformance::suite;
using conformance::test_name;
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

ReplayOptions on_gpu() {
  ReplayOptions options;
  options.backend = Backend::Unfused;
  options.device = kGpu;
  return options;
}

class GpuSuite : public GpuTestWith<std::tuple<CacheKind, std::string>> {};

std::string suite_name(const ::testing::TestParamInfo<GpuSuite::ParamType>& tested) {
  const auto& [kind, line] = tested.param;
  return test_name(std::string(to_string(kind)) + "_" + line);
}

TEST_P(GpuSuite, AgreesWithTheOracle) {
  ReplayOptions options = on_gpu();
  options.kind = std::get<0>(GetParam());
  expect_pass(make_case(parse_spec(std::get<1>(GetParam()))), options);
}

TEST_P(GpuSuite, AgreesWithTheOracleOverACallersCache) {
  ReplayOptions options = on_gpu();
  options.kind = std::get<0>(GetParam());
  options.callers_cache = true;
  expect_pass(make_case(parse_spec(std::get<1>(GetParam()))), options);
}

TEST_P(GpuSuite, GivesTheSameBitsTwice) {
  ReplayOptions options = on_gpu();
  options.kind = std::get<0>(GetParam());
  conformance::expect_same_bits(make_case(parse_spec(std::get<1>(GetParam()))), options, options);
}

INSTANTIATE_TEST_SUITE_P(Unfused, GpuSuite,
                         Combine(Values(CacheKind::Paged, CacheKind::Contiguous),
                                 ValuesIn(suite())),
                         suite_name);

/// Lines that cuDNN can run; whole lives among them.
class GpuFused : public GpuTestWith<std::tuple<CacheKind, std::string>> {
 protected:
  void SetUp() override {
    GpuTestWith::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) require_backend(Backend::Fused);
  }
  static void expect_right(bool callers_cache) {
    ReplayOptions options = on_gpu();
    options.backend = Backend::Fused;
    options.kind = std::get<0>(GetParam());
    options.callers_cache = callers_cache;
    expect_pass(make_case(parse_spec(std::get<1>(GetParam()))), options);
  }
};

TEST_P(GpuFused, AgreesWithTheOracle) { expect_right(false); }
TEST_P(GpuFused, AgreesWithTheOracleOverACallersCache) { expect_right(true); }

INSTANTIATE_TEST_SUITE_P(Fused, GpuFused,
                         Combine(Values(CacheKind::Paged, CacheKind::Contiguous),
                                 Values("b3 q1 s17 steps3 hq9 hkv3 d64 p16 bf16 seed4",
                                        "b2 q5 s63 steps3 hq4 hkv1 d64 p7 f16 bshd seed5",
                                        "b2 q64 s65 steps2 hq7 hkv1 d32 p3 bf16 sbhd seed6",
                                        "b1 q2 s700 steps2 hq6 hkv2 d32 p16 bf16 seed9",
                                        "b2 q2 s40 hq4 hkv1 d192 dv128 p16 bf16 seed14",
                                        "b3 q7 s50 steps6 hq4 hkv2 d32 p8 f16 w24,0 life seed161",
                                        "b4 q3 s30 steps8 hq4 hkv1 d64 p4 bf16 life sbhd seed162")),
                         suite_name);

class GpuPageSize : public GpuTestWith<std::int32_t> {};

TEST_P(GpuPageSize, MakesNoDifference) {
  for (const std::string& line : suite()) {
    SCOPED_TRACE(line);
    ReplayOptions options = on_gpu();
    options.page_size = GetParam();
    options.scramble = 5;
    expect_pass(make_case(parse_spec(line)), options);
  }
}

INSTANTIATE_TEST_SUITE_P(Unfused, GpuPageSize, Values(1, 3, 16, 64, 256));

TEST_F(GpuTest, OutputsMayBeF32) {
  ReplayOptions options = on_gpu();
  options.out_dtype = DType::F32;
  options.in_halves = true;
  expect_pass(make_case(parse_spec("b3 q2 s50 hq4 hkv2 d32 bf16 seed61")), options);
}

std::string data_dir() {
  const char* moved = std::getenv("OCTAVO_TEST_DATA");
  return moved != nullptr ? moved : OCTAVO_TEST_DATA_DIR;
}

TEST_F(GpuTest, CaseFilesGiveWhatTheirNamesSay) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(data_dir() + "/cases")) {
    const std::string name = entry.path().stem();
    SCOPED_TRACE(name);
    const ReplayResult result = replay(testkit::read_case(entry.path()), on_gpu());
    if (name == "small_fp8") {
      EXPECT_EQ(result.verdict, Verdict::Refused);
      EXPECT_THAT(result.reason, HasSubstr("compute fp8"));
    } else if (name == "small_out_of_pages") {
      EXPECT_EQ(result.verdict, Verdict::Unmet);
    } else {
      EXPECT_EQ(result.verdict, Verdict::Pass) << result.reason;
    }
    ++files;
  }
  EXPECT_GE(files, 10);
}

// More than the small cases: rows longer than a block keeps in registers, several chunks of tokens
// and heads, batches whose lengths differ.
TEST_F(GpuTest, LongRowsAreReadTwice) {
  expect_pass(make_case(parse_spec("b1 q1 s17000 steps2 hq2 hkv1 d16 p16 bf16 seed62")), on_gpu());
}

TEST_F(GpuTest, LengthsOfABatchMayDiffer) {
  expect_pass(make_case(parse_spec("b24 q3 s900 steps3 hq4 hkv2 d32 p16 f32 life seed63")),
              on_gpu());
}

}  // namespace
}  // namespace octavo::gpu_tests
