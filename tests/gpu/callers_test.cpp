// SPDX-License-Identifier: Apache-2.0
// Attention over caches that the caller manages in a GPU's memory, against the oracle.
#include "tests/gpu/callers.h"
#include "testing/spec.h"
#include "tests/conformance/suite.h"
#include "tests/gpu/flash2_lines.h"

#include <octavo/backend.h>
#include <octavo/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

namespace octavo::gpu_tests {
namespace {

using ::testing::HasSubstr;
using ::testing::Values;
using ::testing::ValuesIn;
using testkit::Case;
using testkit::Comparison;
using testkit::make_case;
using testkit::parse_spec;

/// Lines without whole lives: forks and cuts are what the caller does himself.
std::vector<std::string> without_lives(std::vector<std::string> lines) {
  std::erase_if(lines, [](const std::string& line) { return line.find("life") != line.npos; });
  return lines;
}

const std::vector<std::string> kFusedLines = {
    "b3 q1 s15 steps3 hq4 hkv4 d64 p16 bf16 seed101",
    "b4 q1 s129 steps3 hq8 hkv2 d128 p1 f16 seed102",
    "b2 q5 s63 steps3 hq4 hkv1 d64 p7 f16 bshd seed103",
    "b2 q64 s65 steps2 hq8 hkv1 d32 p3 bf16 sbhd seed104",
    "b3 q9 s200 steps3 hq4 hkv2 d64 p48 bf16 seed105",
    "b3 q3 s90 hq4 hkv2 d32 p8 bf16 w24,0 seed106",
    "b2 q2 s40 hq4 hkv1 d192 dv128 p16 bf16 full seed107",
    "b20 q2 s300 steps3 hq4 hkv2 d64 p16 f16 seed108",
};

class Callers : public GpuTestWith<std::tuple<PoolLayout, std::string>> {
 protected:
  void expect_right(Backend backend) {
    const auto& [layout, line] = GetParam();
    const Case value = make_case(parse_spec(line));
    const Comparison result = GpuCallersCache(value, layout, value.cache.page_size).run(backend);
    EXPECT_TRUE(result.ok()) << line << "\n" << result.worst.to_string();
  }
};

std::string callers_name(const ::testing::TestParamInfo<Callers::ParamType>& tested) {
  static const char* const kNames[] = {"nhd", "hnd", "interleaved", "contiguous", "in_order"};
  const auto& [layout, line] = tested.param;
  return conformance::test_name(std::string(kNames[static_cast<int>(layout)]) + "_" + line);
}

TEST_P(Callers, CacheAgreesWithTheOracle) { expect_right(Backend::Unfused); }

INSTANTIATE_TEST_SUITE_P(Unfused, Callers,
                         ::testing::Combine(Values(PoolLayout::Nhd, PoolLayout::Hnd,
                                                   PoolLayout::Interleaved, PoolLayout::Contiguous,
                                                   PoolLayout::InOrder),
                                            ValuesIn(without_lives(conformance::suite()))),
                         callers_name);

class FusedCallers : public Callers {
 protected:
  void SetUp() override {
    Callers::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) require_backend(Backend::Fused);
  }
};

TEST_P(FusedCallers, CacheAgreesWithTheOracle) { expect_right(Backend::Fused); }

INSTANTIATE_TEST_SUITE_P(Fused, FusedCallers,
                         ::testing::Combine(Values(PoolLayout::Nhd, PoolLayout::Hnd,
                                                   PoolLayout::Contiguous, PoolLayout::InOrder),
                                            ValuesIn(kFusedLines)),
                         callers_name);

class Flash2Callers : public Callers {
 protected:
  void SetUp() override {
    Callers::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) require_backend(Backend::Flash2);
  }
};

TEST_P(Flash2Callers, CacheAgreesWithTheOracle) { expect_right(Backend::Flash2); }

INSTANTIATE_TEST_SUITE_P(Flash2, Flash2Callers,
                         ::testing::Combine(Values(PoolLayout::Nhd, PoolLayout::Hnd,
                                                   PoolLayout::Contiguous, PoolLayout::InOrder),
                                            ValuesIn(without_lives(flash2_lines()))),
                         callers_name);

/// As an index or an address any of 0x7F bytes is far outside of everything: nothing of a workspace
/// is read before it was written, what belongs to tokens behind the step's end least of all.
class PoisonedWorkspace : public GpuTestWith<std::tuple<Backend, std::string>> {};

TEST_P(PoisonedWorkspace, IsWrittenBeforeItIsRead) {
  const auto& [backend, line] = GetParam();
  require_backend(backend);
  if (IsSkipped()) return;
  const Case value = make_case(parse_spec(line));
  GpuCallersCache cache(value, PoolLayout::Nhd, value.cache.page_size);
  cache.poison_workspace(std::byte{0x7F}, 37);
  const Comparison result = cache.run(backend);
  EXPECT_TRUE(result.ok()) << line << "\n" << result.worst.to_string();
}

INSTANTIATE_TEST_SUITE_P(
    Backends, PoisonedWorkspace,
    ::testing::Combine(Values(Backend::Unfused, Backend::Fused, Backend::Flash2),
                       Values("b3 q9 s60 steps3 hq4 hkv2 d64 p16 bf16 seed141",
                              "b3 q9 s60 steps3 hq4 hkv2 d64 p16 bf16 bshd seed142",
                              "b3 q9 s60 steps3 hq4 hkv2 d64 p16 f16 sbhd seed143",
                              "b5 q1 s33 steps3 hq4 hkv4 d64 p7 bf16 bshd seed144",
                              "b5 q1 s33 steps3 hq4 hkv4 d64 p1 bf16 sbhd seed145",
                              "b2 q70 s90 steps2 hq8 hkv1 d128 p16 bf16 bshd seed146")),
    [](const auto& tested) {
      return conformance::test_name(std::string(to_string(std::get<0>(tested.param))) + "_" +
                                    std::get<1>(tested.param));
    });

/// It loads 16 bytes at a time, of which this pool has half in K and half in V.
class Flash2Interleaved : public Flash2Callers {};

TEST_P(Flash2Interleaved, IsRefused) {
  const auto& [layout, line] = GetParam();
  const Case value = make_case(parse_spec(line));
  try {
    GpuCallersCache(value, layout, value.cache.page_size).run(Backend::Flash2);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                ::testing::HasSubstr("rows of K or V that begin at no multiple of 16"));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Flash2, Flash2Interleaved,
    ::testing::Combine(Values(PoolLayout::Interleaved),
                       Values("b3 q1 s63 steps3 hq3 hkv1 d64 p1 bf16 seed401")),
    callers_name);

/// A step of two sequences over a caller's cache, ready to run; tests spoil something.
class CallersStep : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    value_ = make_case(parse_spec("b2 q2 s20 steps2 hq4 hkv2 d16 p4 bf16 seed111"));
    cache_.emplace(value_, PoolLayout::Nhd, 4);
    const testkit::CaseStep& step = value_.steps[0];
    cache_->prepare(step);
    q_.emplace(kGpu, step.q);
    k_.emplace(kGpu, step.k);
    v_.emplace(kGpu, step.v);
    host_out_ = testkit::HostTensor(value_.dtype, step.out.shape());
    out_.emplace(kGpu, host_out_);
    config_ = value_.attention;
    config_.backend = Backend::Unfused;
    inputs_ = cache_->inputs_of(q_->view(), k_->view(), v_->view());
    cache_->arrays().num_seqs = 2;
    cache_->arrays().num_tokens = static_cast<std::int32_t>(step.q.shape()[0]);
    cache_->take_workspace(config_, inputs_, out_->view(), nullptr);
  }

  void run() {
    append_tokens(config_, cache_->view(), cache_->arrays(), inputs_);
    attend(config_, cache_->view(), cache_->arrays(), inputs_, out_->view());
  }

  template <typename CallT>
  std::string refused(CallT call) {
    const std::vector<std::byte> before = pool();
    out_->download(host_out_);
    const testkit::HostTensor out_before = host_out_;
    std::string message = "nothing was thrown";
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
      message = error.what();
    }
    EXPECT_TRUE(pool() == before);
    out_->download(host_out_);
    EXPECT_TRUE(host_out_ == out_before);
    return message;
  }
  std::string plan_refused() {
    return refused([&] { cache_->workspace().plan(cache_->view(), cache_->arrays()); });
  }
  std::string attend_refused() {
    return refused(
        [&] { attend(config_, cache_->view(), cache_->arrays(), inputs_, out_->view()); });
  }

  /// Plans, runs, and gives the message of Workspace::check.
  std::string fault() {
    cache_->upload();
    cache_->workspace().plan(cache_->view(), cache_->arrays());
    run();
    out_->download(host_out_);
    try {
      cache_->workspace().check();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      return error.what();
    }
    return "no fault";
  }

  [[nodiscard]] std::vector<std::byte> pool() const {
    std::vector<std::byte> bytes(cache_->pool().size());
    cache_->pool().download(bytes.data(), bytes.size());
    return bytes;
  }

  /// Whether the rows of a sequence's tokens are all 0, and those of the other are not.
  void expect_zeros_of(std::size_t b) {
    const auto& offsets = cache_->offsets().values;
    const std::int64_t width = 4 * 16;
    for (std::size_t seq = 0; seq < 2; ++seq) {
      bool zero = true;
      for (std::int64_t i = offsets[seq] * width; i < offsets[seq + 1] * width; ++i)
        zero = zero && host_out_.get(i) == 0.0;
      EXPECT_EQ(zero, seq == b) << seq;
    }
  }

  Case value_;
  std::optional<GpuCallersCache> cache_;
  std::optional<testkit::DeviceTensor> q_, k_, v_, out_;
  testkit::HostTensor host_out_;
  AttentionConfig config_;
  LayerInputs inputs_;
};

TEST_F(CallersStep, HasNoFaultAsItIs) { EXPECT_EQ(fault(), "no fault"); }

TEST_F(CallersStep, LeavesOutASequenceWithAPageOutsideThePool) {
  const std::int32_t row = cache_->rows().values[1];
  const std::int32_t width = cache_->view().max_pages_per_seq;
  cache_->table().values[static_cast<std::size_t>(row * width)] = GpuCallersCache::kNoPage;
  EXPECT_THAT(fault(), HasSubstr("entry 0 of the page table's row of sequence 1: wanted 0 …"));
  expect_zeros_of(1);
}

TEST_F(CallersStep, LeavesOutASequenceWithARowOutsideTheTable) {
  cache_->rows().values[0] = -7;
  EXPECT_THAT(fault(), HasSubstr("cache.row_indices[0]: wanted 0 …"));
  expect_zeros_of(0);
}

TEST_F(CallersStep, LeavesOutASequenceThatIsTooLong) {
  cache_->kv_lens().values[1] = std::numeric_limits<std::int32_t>::max();
  EXPECT_THAT(fault(), HasSubstr("step.kv_lens[1]: wanted 0 …"));
  expect_zeros_of(1);
}

TEST_F(CallersStep, IsEmptyWhereOffsetsFall) {
  cache_->offsets().values[2] = cache_->offsets().values[1] - 1;
  EXPECT_THAT(fault(), HasSubstr("step.token_offsets[2]: wanted no less than the one before"));
  for (std::int64_t i = 0; i < host_out_.size(); ++i) ASSERT_EQ(host_out_.get(i), 0.0);
  for (const std::byte b : pool()) ASSERT_EQ(b, std::byte{0xFF});  // nothing was written
}

TEST_F(CallersStep, NamesArraysOfTheHost) {
  cache_->arrays().kv_lens = cache_->kv_lens().values.data();
  EXPECT_EQ(plan_refused(), "step.kv_lens: wanted memory of cuda:0, got memory of the host");
  cache_->arrays().kv_lens = cache_->kv_lens().get();
  cache_->view().page_table = cache_->table().values.data();
  EXPECT_EQ(plan_refused(), "cache.page_table: wanted memory of cuda:0, got memory of the host");
  cache_->view().page_table = cache_->table().get();
  cache_->view().row_indices = cache_->rows().values.data();
  EXPECT_EQ(plan_refused(), "cache.row_indices: wanted memory of cuda:0, got memory of the host");
  cache_->view().row_indices = cache_->rows().get();
  cache_->arrays().token_offsets = cache_->offsets().values.data();
  EXPECT_EQ(plan_refused(), "step.token_offsets: wanted memory of cuda:0, got memory of the host");
}

TEST_F(CallersStep, NamesAnotherGpu) {
  cache_->workspace().plan(cache_->view(), cache_->arrays());
  cache_->view().v.device.index = 1;
  EXPECT_EQ(attend_refused(), "cache.v.device: wanted cuda:0, got cuda:1");
  cache_->view().k.device.index = 99;
  EXPECT_THAT(attend_refused(), HasSubstr("cache.k.device.index: wanted 0 …"));
  EXPECT_EQ(plan_refused(), "cache.k.device: wanted cuda:0, got cuda:99");
}

TEST_F(CallersStep, NamesQueriesOfTheHost) {
  cache_->workspace().plan(cache_->view(), cache_->arrays());
  inputs_.q = value_.steps[0].q.view();
  EXPECT_EQ(attend_refused(), "q.device: wanted cuda:0, got cpu");
}

TEST_F(CallersStep, NamesAPoolOfTheHost) {
  cache_->workspace().plan(cache_->view(), cache_->arrays());
  cache_->view().v.data = host_out_.data();
  EXPECT_EQ(attend_refused(), "cache.v.data: wanted memory of cuda:0, got memory of the host");
}

TEST_F(CallersStep, NamesAStepThatWasNotPlanned) {
  EXPECT_THAT(attend_refused(), HasSubstr("got none was planned"));
  cache_->workspace().plan(cache_->view(), cache_->arrays());
  --cache_->arrays().max_kv_len;
  EXPECT_THAT(attend_refused(), HasSubstr("got other arrays"));
}

TEST_F(CallersStep, ChecksAnAttentionBeforeItsPlan) {
  const auto check = [&] {
    return refused(
        [&] { check_attend(config_, cache_->view(), cache_->arrays(), inputs_, out_->view()); });
  };
  EXPECT_EQ(check(), "nothing was thrown");
  inputs_.q = value_.steps[0].q.view();
  EXPECT_EQ(check(), "q.device: wanted cuda:0, got cpu");
  inputs_.q = q_->view();
  testkit::DeviceMemory memory(kGpu, 4096);
  cache_->workspace().use(memory.data(), 512);
  EXPECT_THAT(check(), HasSubstr("workspace_bytes: wanted at least"));
  cache_->arrays().workspace = nullptr;
  EXPECT_EQ(check(), "step.workspace: wanted a Workspace of cuda:0, got null");
}

TEST_F(CallersStep, NamesAMissingWorkspace) {
  cache_->arrays().workspace = nullptr;
  EXPECT_EQ(attend_refused(), "step.workspace: wanted a Workspace of cuda:0, got null");
}

TEST_F(CallersStep, NamesAWorkspaceThatIsTooSmall) {
  testkit::DeviceMemory memory(kGpu, 4096);
  cache_->workspace().use(memory.data(), 512);
  EXPECT_THAT(plan_refused(), HasSubstr("workspace_bytes: wanted at least"));
  cache_->workspace().use(memory.data(), 4096);
  cache_->workspace().plan(cache_->view(), cache_->arrays());
  EXPECT_THAT(attend_refused(), HasSubstr("by unfused, got"));
}

TEST_F(CallersStep, NamesWorkspaceOfTheHost) {
  alignas(256) static std::byte memory[4096];
  EXPECT_EQ(refused([&] { cache_->workspace().use(memory, 4096); }),
            "memory: wanted memory of cuda:0, got memory of the host");
}

TEST_F(CallersStep, NamesTablesOfRopeThatAreTooShort) {
  cache_->workspace().plan(cache_->view(), cache_->arrays());
  const testkit::DeviceTensor table(kGpu, testkit::HostTensor(DType::F32, {3, 8}));
  const Rope rope{.cos = table.floats(), .sin = table.floats(), .num_table_positions = 3};
  inputs_.rope = &rope;
  EXPECT_THAT(attend_refused(), HasSubstr("rope.num_table_positions: wanted at least"));
}

TEST_F(CallersStep, ExplainsEachBackend) {
  const Explanation explanation = explain(config_, cache_->view(), inputs_);
  EXPECT_EQ(explanation.chosen, Backend::Unfused);
  EXPECT_GE(explanation.backends.size(), 3U);
}

TEST_F(GpuTest, AWorkspaceIsNotForTheCpu) {
  try {
    Workspace workspace(Device{});
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "device: wanted cuda, got cpu");
  }
}

}  // namespace
}  // namespace octavo::gpu_tests
