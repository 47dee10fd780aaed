// SPDX-License-Identifier: Apache-2.0
// The feature table on machines that are not there, and the environment's word.
#include "dispatch/features.h"

#include <octavo/error.h>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>

#include "kernels/cuda/flash2/row_steps.h"

namespace octavo::dispatch {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

Request on_gpu(std::int32_t sm, DType dtype) {
  Request request;
  request.device = DeviceType::Cuda;
  request.machine = {.cuda_compiled = true, .sm = sm};
  request.cache_dtype = dtype;
  request.head_dim = request.head_dim_v = 64;
  return request;
}

TEST(FeatureTable, LetsUnfusedRunOnEveryGpuThatIsBuiltFor) {
  for (const std::int32_t sm : {75, 80, 86, 89, 90, 100, 120}) {
    EXPECT_TRUE(can_run(Backend::Unfused, on_gpu(sm, DType::F32))) << sm;
    EXPECT_TRUE(can_run(Backend::Unfused, on_gpu(sm, DType::F16))) << sm;
  }
}

TEST(FeatureTable, NamesAGpuThatIsTooOld) {
  const Support support = explain(Backend::Unfused, on_gpu(70, DType::F16));
  EXPECT_FALSE(support.ok);
  EXPECT_THAT(support.missing, Contains("sm70"));
}

TEST(FeatureTable, WantsSm80ForBf16) {
  EXPECT_THAT(explain(Backend::Unfused, on_gpu(75, DType::BF16)).missing, Contains("bf16 on sm75"));
  EXPECT_TRUE(can_run(Backend::Unfused, on_gpu(80, DType::BF16)));
}

TEST(FeatureTable, WantsSm80ForBf16QueriesToo) {
  Request request = on_gpu(75, DType::F32);
  request.q_dtype = DType::BF16;
  EXPECT_THAT(explain(Backend::Unfused, request).missing, Contains("bf16 on sm75"));
}

TEST(FeatureTable, KeepsTheHostsBackendOffGpus) {
  EXPECT_THAT(explain(Backend::Cpu, on_gpu(90, DType::F16)).missing, Contains("device cuda"));
}

TEST(FeatureTable, NamesTheDeviceWhereTheCudaPartIsAbsent) {
  Request request = on_gpu(90, DType::F16);
  request.machine.cuda_compiled = false;
  EXPECT_THAT(explain(Backend::Unfused, request).missing, Contains("device cuda"));
}

Request on_h200(DType dtype) {
  Request request = on_gpu(90, dtype);
  request.machine.fused_compiled = true;
  request.machine.cudnn_version = 91900;
  return request;
}

TEST(FeatureTable, TakesFusedWhenItIsNamedAndCudnnCan) {
  EXPECT_EQ(explain_all(Backend::Fused, Backend::Fused, on_h200(DType::BF16)).chosen,
            Backend::Fused);
  EXPECT_EQ(explain_all(Backend::Fused, Backend::Fused, on_h200(DType::F32)).chosen, Backend::Auto);
  EXPECT_NE(explain_all(Backend::Auto, Backend::Auto, on_h200(DType::BF16)).chosen, Backend::Fused);
}

TEST(FeatureTable, TakesFusedByItselfWhereItRepeatsAndIsFast) {
  Request request = on_h200(DType::BF16);
  request.machine.fused_repeats = true;
  request.aligned_cache_rows = false;  // flash2 needs them
  request.fused.q_len = 1;
  request.fused.kv_len = 8192;
  EXPECT_EQ(choose(Backend::Auto, request), Backend::Fused);
  request.fused.q_len = 4;
  EXPECT_EQ(choose(Backend::Auto, request), Backend::Unfused);
  EXPECT_EQ(explain_all(Backend::Auto, Backend::Auto, request).chosen, Backend::Unfused);
  EXPECT_EQ(choose(Backend::Fused, request), Backend::Fused);
  request.fused.kv_len = 500;
  EXPECT_EQ(choose(Backend::Auto, request), Backend::Fused);
}

TEST(FeatureTable, SaysWhatCudnnLacks) {
  Request request = on_h200(DType::BF16);
  request.machine.cudnn_version = 91000;
  request.fused.softcap = true;
  EXPECT_THAT(explain(Backend::Fused, request).missing,
              ElementsAre("a cuDNN without the faults of 9.10.0 and 9.10.1 in 16-bit attention",
                          "softcap"));
}

TEST(FeatureTable, KeepsFusedOffTheHost) {
  Request request = on_h200(DType::BF16);
  request.device = DeviceType::Cpu;
  EXPECT_THAT(explain(Backend::Fused, request).missing, Contains("device cpu"));
}

TEST(FeatureTable, SaysWhatFlash2Lacks) {
  const auto missing = [](const Request& request) {
    return explain(Backend::Flash2, request).missing;
  };
  EXPECT_THAT(missing(on_gpu(75, DType::F16)), Contains("sm75"));
  EXPECT_THAT(missing(on_gpu(90, DType::F32)), Contains("cache dtype f32"));
  Request request = on_gpu(80, DType::F16);
  EXPECT_THAT(missing(request), Not(Contains("sm80")));
  EXPECT_THAT(missing(request), Not(Contains("device cuda")));
  request.q_dtype = DType::BF16;
  EXPECT_THAT(missing(request), Contains("q dtype bf16"));
  request.q_dtype = DType::F16;
  EXPECT_THAT(missing(request), Not(Contains("q dtype f16")));
  for (const std::int32_t dim : {20, 260, 520, 576}) {
    request.head_dim_v = dim;
    EXPECT_THAT(missing(request), Contains(fmt::format("head_dim 64, head_dim_v {}", dim)));
  }
  for (const std::int32_t dim : {8, 256, 264, 512}) {
    request.head_dim_v = dim;
    EXPECT_THAT(missing(request), Not(Contains(fmt::format("head_dim 64, head_dim_v {}", dim))));
  }
  request.head_dim = 576;
  EXPECT_THAT(missing(request), Not(Contains("head_dim 576, head_dim_v 512")));
  request.head_dim = 580;
  EXPECT_THAT(missing(request), Contains("head_dim 580, head_dim_v 512"));
  request.aligned_cache_rows = false;
  EXPECT_THAT(missing(request), Contains("rows of K or V that begin at no multiple of 16 bytes"));
  request.device = DeviceType::Cpu;
  EXPECT_THAT(missing(request), Contains("device cpu"));
}

/// Pages of 16 slots of 8 heads of 64, with so many elements between them.
kernels::KvPages pages_apart(std::int64_t page_stride, std::int64_t num_pages) {
  kernels::KvPages pages;
  pages.dtype = DType::F16;
  pages.num_pages = num_pages;
  pages.page_size = 16;
  pages.k.page_stride = pages.v.page_stride = page_stride;
  pages.k.slot_stride = pages.v.slot_stride = 512;
  pages.k.head_stride = pages.v.head_stride = 64;
  return pages;
}

TEST(FeatureTable, CountsRowsInUnitsOfTheirStrides) {
  using kernels::flash2::row_unit_of;
  constexpr std::int64_t kDense = std::int64_t{16} * 512;
  constexpr std::int64_t kMost = std::int64_t{1} << 27U;
  EXPECT_EQ(row_unit_of(pages_apart(kDense, 4)), 1024);
  EXPECT_EQ(row_unit_of(pages_apart(kDense + 8, 4)), 16);
  EXPECT_EQ(row_unit_of(pages_apart(-kDense - 8, 4)), 16);
  // 16 units a page; the last one's slots count too.
  EXPECT_TRUE(has_near_rows(pages_apart(kDense, kMost - 2)));
  EXPECT_FALSE(has_near_rows(pages_apart(kDense, kMost)));
  EXPECT_TRUE(has_near_rows(pages_apart(-kDense, kMost - 2)));
  EXPECT_FALSE(has_near_rows(pages_apart(-kDense, kMost)));
  // 1025 units a page.
  EXPECT_TRUE(has_near_rows(pages_apart(kDense + 8, 2'000'000)));
  EXPECT_FALSE(has_near_rows(pages_apart(kDense + 8, 2'100'000)));
  kernels::KvPages pages = pages_apart(kDense, 2'100'000);
  EXPECT_TRUE(has_near_rows(pages));
  pages.v.page_stride += 8;  // K's unit too
  EXPECT_FALSE(has_near_rows(pages));
}

TEST(FeatureTable, TakesUnfusedByItselfWhereRowsAreTooFarApart) {
  Request request = on_gpu(90, DType::F16);
  request.near_cache_rows = false;
  const std::string row = "rows of K or V 2^31 times their strides' common factor apart";
  EXPECT_THAT(explain(Backend::Flash2, request).missing, Contains(row));
  EXPECT_THAT(explain(Backend::Unfused, request).supported, Contains(row));
  EXPECT_EQ(choose(Backend::Auto, request), Backend::Unfused);
  EXPECT_EQ(explain_all(Backend::Auto, Backend::Auto, request).chosen, Backend::Unfused);
  EXPECT_THROW(choose(Backend::Flash2, request), Error);
  request.device = DeviceType::Cpu;
  EXPECT_EQ(choose(Backend::Auto, request), Backend::Cpu);
}

TEST(FeatureTable, PrefersFlash2OnAGpu) {
  const auto missing = explain(Backend::Flash2, on_gpu(90, DType::BF16)).missing;
  const Backend expected = missing.empty() ? Backend::Flash2 : Backend::Unfused;
  EXPECT_EQ(choose(Backend::Auto, on_gpu(90, DType::BF16)), expected);
  EXPECT_EQ(explain_all(Backend::Auto, Backend::Auto, on_gpu(90, DType::BF16)).chosen, expected);
}

TEST(FeatureTable, TakesUnfusedByItselfForWhatFlash2Lacks) {
  EXPECT_EQ(choose(Backend::Auto, on_gpu(90, DType::F32)), Backend::Unfused);
  EXPECT_EQ(choose(Backend::Auto, on_gpu(75, DType::F16)), Backend::Unfused);
}

/// A host where both of its backends are asked for workspace.
struct Workspaces {
  WorkspaceBytes cpu, unfused;

  [[nodiscard]] WorkspaceOf asked() const {
    return [*this](Backend backend) { return backend == Backend::Cpu ? cpu : unfused; };
  }
};

Request on_host() {
  Request request;
  request.head_dim = request.head_dim_v = 64;
  return request;
}

TEST(FeatureTable, GivesWayToTheNextWhereWorkspaceIsShort) {
  const auto chosen = [](const Workspaces& workspaces) {
    return choose_with_workspace(Backend::Auto, on_host(), 77, workspaces.asked());
  };
  EXPECT_EQ(chosen({{10, 10}, {10, 10}}), Backend::Cpu);
  EXPECT_EQ(chosen({{11, 10}, {10, 10}}), Backend::Unfused);
}

TEST(FeatureTable, DoesNotGiveWayWhereBatchMatesMustNotShow) {
  Request request = on_host();
  request.fused.batch_invariant = true;
  const Workspaces workspaces{{11, 10}, {10, 10}};
  try {
    static_cast<void>(choose_with_workspace(Backend::Auto, request, 77, workspaces.asked()));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "workspace_bytes: wanted at least 11 by cpu, got 10");
  }
  const Explanation explanation =
      explain_with_workspace(Backend::Auto, Backend::Auto, request, workspaces.asked());
  EXPECT_EQ(explanation.chosen, Backend::Auto);
  EXPECT_THAT(explanation.reason, ::testing::StartsWith("cpu lacks workspace"));
}

TEST(FeatureTable, NamesTheWorkspaceThatABackendWants) {
  const auto message = [](Backend named, const Workspaces& workspaces) {
    try {
      static_cast<void>(choose_with_workspace(named, on_host(), 77, workspaces.asked()));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_EQ(message(Backend::Cpu, {{11, 10}, {10, 10}}),
            "workspace_bytes: wanted at least 11 by cpu, got 10");
  EXPECT_EQ(message(Backend::Auto, {{11, 10}, {12, 10}}),
            "workspace_bytes: wanted at least 12 for 77 tokens by unfused, got 10");
}

TEST(FeatureTable, ExplainsThatWorkspaceIsShort) {
  const Explanation explanation =
      explain_with_workspace(Backend::Auto, Backend::Auto, on_host(),
                             [](Backend backend) -> std::optional<WorkspaceBytes> {
                               if (backend == Backend::Cpu) return WorkspaceBytes{11, 10};
                               return std::nullopt;
                             });
  EXPECT_EQ(explanation.chosen, Backend::Unfused);
  const auto cpu = std::find_if(explanation.backends.begin(), explanation.backends.end(),
                                [](const Support& s) { return s.backend == Backend::Cpu; });
  EXPECT_THAT(cpu->missing, ElementsAre("11 bytes of workspace (there are 10)"));
}

class Environment : public ::testing::Test {
 protected:
  void TearDown() override {
    unsetenv("OCTAVO_BACKEND");
    unsetenv("OCTAVO_BLOCK_SMEM_KB");
  }
};

TEST_F(Environment, ReplacesAuto) {
  EXPECT_EQ(choose(Backend::Auto, on_host()), Backend::Cpu);
  setenv("OCTAVO_BACKEND", "unfused", 1);
  const Backend named = or_environments(Backend::Auto);
  EXPECT_EQ(choose(named, on_host()), Backend::Unfused);
  EXPECT_EQ(explain_all(Backend::Auto, named, on_host()).reason, "OCTAVO_BACKEND names it");
}

TEST_F(Environment, LeavesABackendThatTheCallerNamed) {
  setenv("OCTAVO_BACKEND", "unfused", 1);
  EXPECT_EQ(or_environments(Backend::Cpu), Backend::Cpu);
}

TEST_F(Environment, IsHeldToItsWord) {
  setenv("OCTAVO_BACKEND", "cpu", 1);
  EXPECT_THROW(choose(or_environments(Backend::Auto), on_gpu(90, DType::F16)), Error);
}

TEST_F(Environment, NamesAWordThatIsNoBackend) {
  setenv("OCTAVO_BACKEND", "fast", 1);
  try {
    or_environments(Backend::Auto);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("OCTAVO_BACKEND: wanted the name of a backend, got fast"));
  }
}

TEST_F(Environment, MayMakeBlocksSmaller) {
  constexpr std::size_t kAllowed = std::size_t{227} * 1024;
  EXPECT_EQ(block_smem_of_environment(kAllowed), kAllowed);
  setenv("OCTAVO_BLOCK_SMEM_KB", "163", 1);
  EXPECT_EQ(block_smem_of_environment(kAllowed), 163 * 1024);
}

TEST_F(Environment, RefusesBlocksThatNoGpuOrNotThisOneHas) {
  for (const char* text : {"98", "228", "-1", "99kb", "many", " 99"}) {
    setenv("OCTAVO_BLOCK_SMEM_KB", text, 1);
    try {
      block_smem_of_environment(std::size_t{227} * 1024);
      ADD_FAILURE() << text << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), fmt::format("OCTAVO_BLOCK_SMEM_KB: wanted 99 … 227, got {}", text));
    }
  }
}

}  // namespace
}  // namespace octavo::dispatch
