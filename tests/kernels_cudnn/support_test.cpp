// SPDX-License-Identifier: Apache-2.0
// What `fused` says of machines that are not here.
#include "kernels/cudnn/support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace octavo::kernels::fused {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

SupportQuery h200() {
  SupportQuery query;
  query.compiled = true;
  query.sm = 90;
  query.cudnn_version = 91900;
  query.cache_dtype = DType::BF16;
  query.q_dtype = query.out_dtype = DType::BF16;
  query.head_dim = query.head_dim_v = 128;
  query.format = TensorFormat::Thd;
  query.q_len = 512;
  query.kv_len = 4096;
  return query;
}

std::vector<std::string> missing(const SupportQuery& query) {
  std::vector<std::string> names;
  for (const SupportRow& row : support_rows(query)) {
    if (!row.ok) names.push_back(row.name);
  }
  EXPECT_EQ(names.empty(), supported(query));
  return names;
}

TEST(FusedSupport, RunsOnHopperWithCudnn919) { EXPECT_THAT(missing(h200()), IsEmpty()); }

TEST(FusedSupport, NamesTheVersionFound) {
  SupportQuery query = h200();
  query.cudnn_version = 90800;
  EXPECT_THAT(missing(query), ElementsAre("cuDNN 9.10.0 or newer (found: 9.8.0)"));
}

TEST(FusedSupport, SaysWhyThereIsNoCudnn) {
  SupportQuery query = h200();
  query.cudnn_version = 0;
  query.cudnn_why_not = "cuDNN not found: no such file";
  EXPECT_THAT(missing(query),
              ElementsAre("cuDNN 9.10.0 or newer (found: cuDNN not found: no such file)"));
}

TEST(FusedSupport, RefusesBothFaultyPatchesOf910) {
  SupportQuery query = h200();
  for (const std::int32_t version : {91000, 91001}) {
    query.cudnn_version = version;
    EXPECT_THAT(missing(query),
                ElementsAre("a cuDNN without the faults of 9.10.0 and 9.10.1 in 16-bit attention"));
  }
  query.cudnn_version = 91002;
  EXPECT_THAT(missing(query), IsEmpty());
}

TEST(FusedSupport, RefusesWindowsOf9140WithoutCausalMaskOverLongCaches) {
  SupportQuery query = h200();
  query.cudnn_version = 91400;
  query.window_left = 100;
  EXPECT_THAT(missing(query), IsEmpty());
  query.causal = false;
  EXPECT_EQ(missing(query).size(), 1U);
  query.kv_len = 1024;
  EXPECT_THAT(missing(query), IsEmpty());
  query.kv_len = 4096;
  query.cudnn_version = 91401;
  EXPECT_THAT(missing(query), IsEmpty());
}

TEST(FusedSupport, WantsAmpere) {
  SupportQuery query = h200();
  query.format = TensorFormat::Bshd;
  query.sm = 75;
  EXPECT_THAT(missing(query), ElementsAre("sm80 or newer (found: sm75)"));
  query.sm = 80;
  EXPECT_THAT(missing(query), IsEmpty());
}

TEST(FusedSupport, RefusesAdaAndSmallBlackwell) {
  SupportQuery query = h200();
  query.format = TensorFormat::Bshd;
  query.sm = 89;
  EXPECT_THAT(missing(query), ElementsAre("attention over a cache on sm89 (a cuDNN fault)"));
  query.sm = 120;
  EXPECT_THAT(missing(query), ElementsAre("attention over a cache on sm120 (a cuDNN fault)"));
}

TEST(FusedSupport, TakesThdBelowHopperForFewTokensOrByNewerCudnn) {
  SupportQuery query = h200();
  query.sm = 80;
  query.cudnn_version = 91800;
  EXPECT_THAT(missing(query),
              ElementsAre("thd with 512 tokens a sequence on sm80 (convert to bshd)"));
  query.q_len = 1;
  EXPECT_THAT(missing(query), IsEmpty());
  query.q_len = 512;
  query.cudnn_version = 91801;
  EXPECT_THAT(missing(query), IsEmpty());
}

TEST(FusedSupport, TakesSixteenBitsThroughout) {
  SupportQuery query = h200();
  query.cache_dtype = DType::F32;
  EXPECT_THAT(missing(query), ElementsAre("cache dtype f32", "q dtype bf16 over a cache of f32",
                                          "out dtype bf16 over a cache of f32"));
  query.cache_dtype = DType::BF16;
  query.out_dtype = DType::F32;
  EXPECT_THAT(missing(query), ElementsAre("out dtype f32 over a cache of bf16"));
}

TEST(FusedSupport, BoundsHeadDims) {
  SupportQuery query = h200();
  query.head_dim = 100;
  EXPECT_THAT(missing(query), ElementsAre("head dims 100 and 128 (multiples of 8)"));
  query.head_dim = 576;
  EXPECT_THAT(missing(query), ElementsAre("head dims 576 and 128 (at most 256)"));
  query.head_dim = 192;
  EXPECT_THAT(missing(query), IsEmpty());
}

TEST(FusedSupport, ListsEverythingThatCudnnLacks) {
  SupportQuery query = h200();
  query.softcap = query.alibi = query.sinks = query.rotates_q = query.batch_invariant = true;
  query.dense_rows = query.aligned = query.whole_slot_pages = false;
  query.compute = Compute::Fp8;
  EXPECT_EQ(missing(query).size(), 9U);
}

TEST(FusedSupport, SaysWhyItIsNotCompiled) {
  SupportQuery query = h200();
  query.compiled = false;
  EXPECT_THAT(missing(query),
              ElementsAre("compiled into this build (" + std::string(why_not_compiled()) + ")"));
}

TEST(FusedSupport, KnowsWhereCudnnIsSlow) {
  EXPECT_FALSE(is_slow(1, 8192));
  EXPECT_TRUE(is_slow(4, 8192));
  EXPECT_FALSE(is_slow(8192, 8192));
  EXPECT_FALSE(is_slow(4, 512));
}

TEST(FusedSupport, TrustsCudnnWithEmptyRowsWhereThatWasSeen) {
  EXPECT_TRUE(clears_empty_rows(91400, 90));
  EXPECT_TRUE(clears_empty_rows(91900, 90));
  EXPECT_FALSE(clears_empty_rows(91401, 90));
  EXPECT_FALSE(clears_empty_rows(92000, 90));
  EXPECT_FALSE(clears_empty_rows(91900, 80));
  EXPECT_FALSE(clears_empty_rows(0, 90));
}

}  // namespace
}  // namespace octavo::kernels::fused
