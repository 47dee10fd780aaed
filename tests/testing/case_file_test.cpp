// SPDX-License-Identifier: Apache-2.0
// Descriptions that say something wrong. Each test changes one thing in a right file.
#include "testing/case_file.h"

#include "testing/input_error.h"
#include "testing/spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <vector>

namespace octavo::testkit {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

// The complaint about a right case whose description or tensors `change` has touched.
template <typename ChangeT>
std::string complaint(ChangeT&& change) {
  const std::vector<std::byte> right =
      write_case(make_case(parse_spec("b2 q1 s5 steps2 hq2 hkv1 d4 f32 sinks seed1")));
  const SafeTensors file = SafeTensors::parse(right);
  Json description = Json::parse(file.metadata().at("octavo_case"));
  std::map<std::string, StoredTensor> tensors = file.tensors();
  change(description, tensors);
  try {
    (void)case_from(
        SafeTensors::parse(write_safetensors(tensors, {{"octavo_case", description.dump()}})));
  } catch (const InputError& error) {
    return error.what();
  }
  return "none";
}

template <typename ChangeT>
std::string complaint_about(ChangeT&& change) {
  return complaint([&](Json& description, auto&) { change(description); });
}

TEST(CaseFile, AcceptsTheUnchangedCase) {
  EXPECT_EQ(complaint_about([](Json&) {}), "none");
}

TEST(CaseFile, LeavesUnknownFieldsAlone) {
  EXPECT_EQ(complaint_about([](Json& d) { d["author"] = "somebody"; }), "none");
}

TEST(CaseFile, RefusesAnotherVersion) {
  EXPECT_EQ(complaint_about([](Json& d) { d["version"] = 2; }),
            "version: wanted an integer from 1 to 1, got 2");
}

TEST(CaseFile, RefusesAFileWithoutADescription) {
  try {
    (void)case_from(SafeTensors::parse(write_safetensors({}, {})));
    FAIL();
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), "__metadata__: wanted 'octavo_case', got none: no case");
  }
}

TEST(CaseFile, NamesAnUnknownDtype) {
  EXPECT_EQ(complaint_about([](Json& d) { d["dtype"] = "f64"; }),
            "dtype: wanted one of f32, f16, bf16, got 'f64'");
}

TEST(CaseFile, NamesAnUnknownCompute) {
  EXPECT_EQ(complaint_about([](Json& d) { d["compute"] = "bf16"; }),
            "compute: wanted f32 or fp8, got 'bf16'");
}

TEST(CaseFile, TakesFp8AsCompute) {
  EXPECT_EQ(complaint_about([](Json& d) { d["compute"] = "fp8"; }), "none");
}

TEST(CaseFile, RefusesHeadsThatDontDivide) {
  EXPECT_EQ(complaint_about([](Json& d) { d["attention"]["num_heads_kv"] = 3; }),
            "attention.num_heads: wanted a multiple of num_heads_kv 3, got 2");
}

TEST(CaseFile, RefusesZeroHeads) {
  EXPECT_EQ(complaint_about([](Json& d) { d["attention"]["num_heads_kv"] = 0; }),
            "attention.num_heads_kv: wanted an integer from 1 to 2147483647, got 0");
}

TEST(CaseFile, RefusesAStringForANumber) {
  EXPECT_EQ(complaint_about([](Json& d) { d["cache"]["page_size"] = "16"; }),
            "cache.page_size: wanted an integer from 1 to 2147483647, got \"16\"");
}

TEST(CaseFile, RefusesPageSizeZero) {
  EXPECT_THAT(complaint_about([](Json& d) { d["cache"]["page_size"] = 0; }),
              HasSubstr("cache.page_size: wanted an integer from 1"));
}

TEST(CaseFile, RefusesANegativeScale) {
  EXPECT_THAT(complaint_about([](Json& d) { d["attention"]["softmax_scale"] = -1.0; }),
              HasSubstr("attention.softmax_scale: wanted a number from"));
}

TEST(CaseFile, RefusesAWindowBelowMinusOne) {
  EXPECT_THAT(complaint_about([](Json& d) {
                d["attention"]["window"] = {-2, 0};
              }),
              HasSubstr("attention.window: wanted an integer from -1"));
}

TEST(CaseFile, RefusesAWindowOfOne) {
  EXPECT_EQ(complaint_about([](Json& d) { d["attention"]["window"] = {3}; }),
            "attention.window: wanted 2 elements, got 1");
}

TEST(CaseFile, NamesAnUnknownMask) {
  EXPECT_EQ(complaint_about([](Json& d) { d["attention"]["mask"] = "full"; }),
            "attention.mask: wanted one of causal, none, got 'full'");
}

TEST(CaseFile, RefusesAMissingField) {
  EXPECT_EQ(complaint_about([](Json& d) { d["cache"].erase("max_batch_size"); }),
            "cache: wanted 'max_batch_size', got none");
}

TEST(CaseFile, RefusesStepsThatAreNoArray) {
  EXPECT_EQ(complaint_about([](Json& d) { d["steps"] = 3; }), "steps: wanted an array, got 3");
}

TEST(CaseFile, RefusesTheReleaseOfAnUnknownSequence) {
  EXPECT_EQ(complaint_about([](Json& d) { d["steps"][0]["release"] = {5}; }),
            "steps[0].release: wanted a live sequence, got 5");
}

TEST(CaseFile, RefusesAForkOntoALivingOne) {
  EXPECT_EQ(complaint_about([](Json& d) {
              d["steps"][1]["fork"] = Json::array({{0, 1}});
            }),
            "steps[1].fork: wanted a new id, got 1, which lives");
}

TEST(CaseFile, RefusesToTruncateBeyondTheLength) {
  EXPECT_EQ(complaint_about([](Json& d) {
              d["steps"][1]["truncate"] = Json::array({{0, 6}});
            }),
            "steps[1].truncate of 0: wanted a length from 0 to 5, got 6");
}

TEST(CaseFile, RefusesASequenceListedTwice) {
  EXPECT_EQ(complaint_about([](Json& d) { d["steps"][1]["sequences"][1][0] = 0; }),
            "steps[1].sequences: wanted each id once, got 0 twice");
}

TEST(CaseFile, RefusesNegativeTokens) {
  EXPECT_THAT(complaint_about([](Json& d) { d["steps"][1]["sequences"][1][1] = -1; }),
              HasSubstr("steps[1].sequences: wanted an integer from 0"));
}

TEST(CaseFile, RefusesTokenCountsWhoseSumOverflows) {
  EXPECT_THAT(complaint_about([](Json& d) {
                d["steps"][1]["sequences"] = {{0, 2147483640}, {1, 2147483640}};
              }),
              HasSubstr("steps[1].sequences: wanted from 0 to"));
}

TEST(CaseFile, RefusesATensorOfAnotherShape) {
  EXPECT_THAT(complaint_about([](Json& d) { d["steps"][1]["sequences"][1][1] = 2; }),
              HasSubstr("tensor 'step1.q': wanted F32 [3, 2, 4], got F32 [2, 2, 4]"));
}

TEST(CaseFile, RefusesATensorOfAnotherDtype) {
  EXPECT_THAT(complaint([](Json&, auto& tensors) { tensors["step0.q"].dtype = "I32"; }),
              HasSubstr("tensor 'step0.q': wanted F32"));
}

TEST(CaseFile, RefusesAMissingTensor) {
  EXPECT_THAT(complaint([](Json&, auto& tensors) { tensors.erase("sinks"); }),
              HasSubstr("tensor 'sinks': wanted F32 [2], got none"));
}

TEST(CaseFile, WantsTheLseWhereThereAreNoSinks) {
  EXPECT_THAT(complaint([](Json& d, auto& tensors) {
                d["attention"]["sinks"] = false;
                tensors.erase("step1.lse");
              }),
              HasSubstr("tensor 'step1.lse': wanted F32 [2, 2], got none"));
}

TEST(CaseFile, DoesWithoutTheLseWhereThereAreSinks) {
  EXPECT_EQ(complaint([](Json&, auto& tensors) { tensors.erase("step1.lse"); }), "none");
}

TEST(CaseFile, RefusesAToleranceWithoutItsRms) {
  EXPECT_THAT(complaint_about([](Json& d) { d["tolerance"].erase("rms"); }),
              HasSubstr("tolerance: wanted 'rms', got none"));
}

}  // namespace
}  // namespace octavo::testkit
