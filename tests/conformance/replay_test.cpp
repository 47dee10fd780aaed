// SPDX-License-Identifier: Apache-2.0
// Every case of the suite, and every case file, on every backend and both kinds of cache.
#include "testing/case_file.h"
#include "tests/conformance/suite.h"

#include <octavo/backend.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

namespace octavo::conformance {
namespace {

using ::testing::Combine;
using ::testing::HasSubstr;
using ::testing::TestWithParam;
using ::testing::Values;
using ::testing::ValuesIn;

class EveryBackend : public TestWithParam<Backend> {};

TEST_P(EveryBackend, IsUsableOrSaysWhyNot) {
  for (const BackendInfo& info : backends()) {
    if (info.backend != GetParam()) continue;
    if (info.usable) return;
    const char* required = std::getenv("OCTAVO_REQUIRE");
    const bool must_run = required != nullptr && std::string(required) == "cuda";
    ASSERT_FALSE(must_run) << info.why_not;
    ASSERT_NE(info.why_not, "");
    GTEST_SKIP() << to_string(GetParam()) << ": " << info.why_not;
  }
  FAIL() << "not listed by backends()";
}

INSTANTIATE_TEST_SUITE_P(Backends, EveryBackend,
                         Values(Backend::Unfused, Backend::Cpu, Backend::Fused, Backend::Flash2,
                                Backend::Flash3),
                         backend_name);

class Suite : public TestWithParam<std::tuple<Backend, CacheKind, std::string>> {};

std::string suite_name(const ::testing::TestParamInfo<Suite::ParamType>& tested) {
  const auto& [backend, kind, line] = tested.param;
  return test_name(std::string(to_string(backend)) + "_" + to_string(kind) + "_" + line);
}

TEST_P(Suite, AgreesWithTheOracle) {
  const auto& [backend, kind, line] = GetParam();
  ReplayOptions options;
  options.backend = backend;
  options.kind = kind;
  expect_pass(testkit::make_case(testkit::parse_spec(line)), options);
}

TEST_P(Suite, GivesTheSameBitsOverACallersCache) {
  const auto& [backend, kind, line] = GetParam();
  ReplayOptions options;
  options.backend = backend;
  options.kind = kind;
  ReplayOptions callers = options;
  callers.callers_cache = true;
  expect_same_bits(testkit::make_case(testkit::parse_spec(line)), options, callers);
}

INSTANTIATE_TEST_SUITE_P(Backends, Suite,
                         Combine(ValuesIn(usable_backends()),
                                 Values(CacheKind::Paged, CacheKind::Contiguous),
                                 ValuesIn(suite())),
                         suite_name);

std::vector<std::string> case_files() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(OCTAVO_TEST_DATA_DIR) + "/cases")) {
    names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class CaseFiles : public TestWithParam<std::tuple<Backend, std::string>> {};

TEST_P(CaseFiles, GiveWhatTheirNamesSay) {
  const auto& [backend, name] = GetParam();
  ReplayOptions options;
  options.backend = backend;
  const Case value =
      testkit::read_case(std::string(OCTAVO_TEST_DATA_DIR) + "/cases/" + name + ".safetensors");
  const ReplayResult result = replay(value, options);
  if (name == "small_fp8") {
    EXPECT_EQ(result.verdict, testkit::Verdict::Refused);
    EXPECT_THAT(result.reason, HasSubstr("compute fp8"));
  } else if (name == "small_out_of_pages") {
    EXPECT_EQ(result.verdict, testkit::Verdict::Unmet);
    EXPECT_THAT(result.reason, HasSubstr("pages: wanted 5, got 4"));
  } else {
    EXPECT_EQ(result.verdict, testkit::Verdict::Pass) << result.reason;
    EXPECT_EQ(result.backend, backend);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CaseFiles,
                         Combine(ValuesIn(usable_backends()), ValuesIn(case_files())), line_name);

TEST(Auto, TakesABackendThatPasses) {
  expect_pass(testkit::make_case(testkit::parse_spec("b2 q1 s20 hq4 hkv2 d32 bf16 seed1")), {});
}

}  // namespace
}  // namespace octavo::conformance
