// SPDX-License-Identifier: Apache-2.0
// Attention over caches that the caller manages: any layout, any table, the same results.
#include "testing/case.h"
#include "testing/compare.h"
#include "testing/host_tensor.h"
#include "testing/random.h"
#include "tests/conformance/suite.h"

#include <octavo/attention.h>
#include <octavo/error.h>
#include <octavo/merge.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace octavo::conformance {
namespace {

using ::testing::HasSubstr;
using ::testing::TestWithParam;
using ::testing::ValuesIn;
using testkit::CaseStep;
using testkit::Comparison;
using testkit::HostTensor;
using testkit::make_case;
using testkit::parse_spec;

constexpr std::int32_t kPages = 80;
constexpr std::int32_t kTableRows = 9;
constexpr std::int32_t kMaxPages = 16;

enum class Layout { Nhd, Hnd, Interleaved };

// A caller's pool of pages, all NaN, with a page table that hands pages out from both ends and a
// row for each sequence that is not its batch row.
class CallersCache {
 public:
  CallersCache(const Case& value, Layout layout, std::int64_t page_size)
      : case_(value), page_size_(page_size) {
    const AttentionConfig& a = value.attention;
    const std::int64_t heads = a.num_kv_heads;
    const std::int64_t widest = std::max(a.head_dim, a.head_dim_v);
    // One pool for K and V: page, then K or V, then the rest.
    pool_ = HostTensor(value.dtype, {kPages, 2, page_size, heads, widest});
    const std::int64_t half = page_size * heads * widest;
    view_.k = TensorView(pool_.data(), value.dtype, {kPages, page_size, heads, a.head_dim});
    view_.v = TensorView(pool_.data() + half * dtype_bytes(value.dtype), value.dtype,
                         {kPages, page_size, heads, a.head_dim_v});
    for (TensorView* view : {&view_.k, &view_.v}) {
      view->strides = {2 * half, heads * widest, widest, 1};
      if (layout == Layout::Hnd) view->strides = {2 * half, widest, page_size * widest, 1};
      if (layout == Layout::Interleaved) view->strides = {2 * half, heads * widest, 1, heads};
    }
    // Unused entries are no pages at all.
    table_.assign(kTableRows * kMaxPages, 2147480000);
    view_.page_table = table_.data();
    view_.page_table_stride = kMaxPages;
    view_.num_rows = kTableRows;
    view_.max_pages_per_seq = kMaxPages;
  }

  // Runs all steps; the results are held to the case's.
  Comparison run(Backend backend) {
    Comparison total;
    outs.clear();
    for (std::size_t i = 0; i < case_.steps.size(); ++i) run_step(backend, i, total);
    return total;
  }

  KvView& view() { return view_; }
  std::vector<std::int32_t>& table() { return table_; }
  std::vector<HostTensor> outs;

 private:
  void run_step(Backend backend, std::size_t step_idx, Comparison& total) {
    const CaseStep& step = case_.steps[step_idx];
    std::vector<std::int32_t> offsets = {0};
    std::vector<std::int32_t> kv_lens;
    std::vector<std::int32_t> rows;
    for (const SequenceStep& sequence : step.sequences) {
      const auto row = static_cast<std::int32_t>(kTableRows - 1 - sequence.id);
      std::int64_t& length = lengths_[static_cast<std::size_t>(row)];
      length += sequence.new_tokens;
      for (std::int64_t page = 0; page * page_size_ < length; ++page) {
        std::int32_t& entry = table_[static_cast<std::size_t>(row * kMaxPages + page)];
        if (entry != 2147480000) continue;
        entry = taken_ % 2 == 0 ? taken_ / 2 : kPages - 1 - taken_ / 2;
        ++taken_;
      }
      offsets.push_back(offsets.back() + static_cast<std::int32_t>(sequence.new_tokens));
      kv_lens.push_back(static_cast<std::int32_t>(length));
      rows.push_back(row);
    }
    view_.row_indices = rows.data();
    const StepArrays arrays = {static_cast<std::int32_t>(rows.size()), offsets.back(),
                               offsets.data(), kv_lens.data()};
    AttentionConfig config = case_.attention;
    config.backend = backend;
    LayerInputs inputs;
    inputs.q = step.q.view();
    inputs.k = step.k.view();
    inputs.v = step.v.view();
    inputs.format = case_.format;
    append_tokens(config, view_, arrays, inputs);
    HostTensor out(case_.dtype, step.out.shape());
    HostTensor lse(DType::F32, step.lse->shape());
    const TensorView lse_view = lse.view();
    attend(config, view_, arrays, inputs, out.view(), &lse_view);
    compare_step(case_, static_cast<std::int64_t>(step_idx), out, lse, total);
    outs.push_back(std::move(out));
  }

  const Case& case_;
  std::int64_t page_size_;
  HostTensor pool_;
  KvView view_;
  std::vector<std::int32_t> table_;
  std::int64_t lengths_[kTableRows] = {};
  std::int32_t taken_ = 0;
};

class Callers : public TestWithParam<Backend> {
 protected:
  Case case_ = make_case(parse_spec("b5 q3 s30 steps4 hq6 hkv2 d24 dv16 bf16 bshd w20,0 seed71"));
};

TEST_P(Callers, CacheOfPagesTokensHeadsAgreesWithTheOracle) {
  const Comparison result = CallersCache(case_, Layout::Nhd, 5).run(GetParam());
  EXPECT_TRUE(result.ok()) << result.worst.to_string();
}

TEST_P(Callers, CacheWithHeadsBeforeTokensAgreesWithTheOracle) {
  const Comparison result = CallersCache(case_, Layout::Hnd, 16).run(GetParam());
  EXPECT_TRUE(result.ok()) << result.worst.to_string();
}

TEST_P(Callers, CacheOfPageSizeOneAgreesWithTheOracle) {
  Case short_case = make_case(parse_spec("b4 q2 s9 steps3 hq2 hkv2 d16 f32 seed72"));
  const Comparison result = CallersCache(short_case, Layout::Hnd, 1).run(GetParam());
  EXPECT_TRUE(result.ok()) << result.worst.to_string();
}

INSTANTIATE_TEST_SUITE_P(Backends, Callers, ValuesIn(usable_backends()), backend_name);

TEST(CallersCacheOfAnyStride, RunsUnfusedWithTheElementsOfAHeadApart) {
  const Case value = make_case(parse_spec("b5 q3 s30 steps4 hq6 hkv2 d24 f16 seed73"));
  const Comparison result = CallersCache(value, Layout::Interleaved, 7).run(Backend::Unfused);
  EXPECT_TRUE(result.ok()) << result.worst.to_string();
}

TEST(CallersCacheOfAnyStride, IsRefusedByCpuWithTheElementsOfAHeadApart) {
  const Case value = make_case(parse_spec("b5 q3 s30 steps1 hq6 hkv2 d24 f16 seed73"));
  CallersCache cache(value, Layout::Interleaved, 7);
  try {
    (void)cache.run(Backend::Cpu);
    FAIL() << "wanted a refusal";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Unsupported);
    EXPECT_THAT(error.what(), HasSubstr("missing"));
  }
}

TEST(CallersCacheOfAnyStride, GivesCpusOwnCachesBits) {
  const Case value = make_case(parse_spec("b5 q3 s200 steps3 hq6 hkv2 d24 p16 f32 seed74"));
  ReplayOptions options;
  options.backend = Backend::Cpu;
  options.keep_outputs = true;
  const ReplayResult own = replay(value, options);
  CallersCache callers(value, Layout::Hnd, 32);
  (void)callers.run(Backend::Cpu);
  EXPECT_TRUE(own.outs == callers.outs);
}

// Pages of all sequences in one list, each row of which is one entry further on.
TEST(CallersCacheOfOneList, GivesTheTablesBits) {
  const Case value = make_case(parse_spec("b4 q3 s90 hq4 hkv2 d16 p16 f32 seed76"));
  CallersCache callers(value, Layout::Nhd, 16);
  (void)callers.run(Backend::Cpu);
  const CaseStep& step = value.steps[0];
  std::vector<std::int32_t> list, starts, kv_lens, offsets = {0};
  for (const SequenceStep& sequence : step.sequences) {
    const auto row = static_cast<std::size_t>(kTableRows - 1 - sequence.id);
    const auto length = static_cast<std::int32_t>(sequence.new_tokens);
    starts.push_back(static_cast<std::int32_t>(list.size()));
    for (std::size_t page = 0; page * 16 < static_cast<std::size_t>(length); ++page)
      list.push_back(callers.table()[row * kMaxPages + page]);
    kv_lens.push_back(length);
    offsets.push_back(offsets.back() + length);
  }
  KvView view = callers.view();
  view.num_rows = static_cast<std::int32_t>(list.size());
  list.resize(list.size() + kMaxPages, -1);
  view.page_table = list.data();
  view.page_table_stride = 1;
  view.row_indices = starts.data();
  LayerInputs inputs;
  inputs.q = step.q.view();
  inputs.format = value.format;
  HostTensor out(value.dtype, step.out.shape());
  const auto num_seqs = static_cast<std::int32_t>(starts.size());
  attend(value.attention, view, {num_seqs, offsets.back(), offsets.data(), kv_lens.data()}, inputs,
         out.view());
  EXPECT_TRUE(out == callers.outs[0]);
}

// One sequence of 3 tokens in a pool of 4 pages of 2 slots, one head of 4.
class OutOfRange : public ::testing::Test {
 protected:
  OutOfRange() {
    config_.head_dim = 4;
    view_.k = pool_k_.view();
    view_.v = pool_v_.view();
    view_.page_table = table_.data();
    view_.page_table_stride = 2;
    view_.num_rows = 1;
    view_.max_pages_per_seq = 2;
    inputs_.q = q_.view();
    inputs_.k = k_.view();
    inputs_.v = k_.view();
  }

  // What append_tokens says; `attend` must refuse as well, and neither may have written.
  std::string refused() {
    const HostTensor pool = pool_k_;
    const HostTensor out = out_;
    const StepArrays step = {1, 1, offsets_.data(), kv_lens_.data()};
    const std::string of_attend =
        message_of([&] { attend(config_, view_, step, inputs_, out_.view()); });
    EXPECT_NE(of_attend, "none");
    EXPECT_EQ(message_of([&] { check_attend(config_, view_, step, inputs_, out_.view()); }),
              of_attend);
    EXPECT_TRUE(out_ == out);
    std::string message = message_of([&] { append_tokens(config_, view_, step, inputs_); });
    EXPECT_TRUE(pool_k_ == pool);
    return message;
  }

  template <typename CallT>
  static std::string message_of(const CallT& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "none";
  }

  AttentionConfig config_;
  HostTensor pool_k_ = HostTensor(DType::F32, {4, 2, 1, 4});
  HostTensor pool_v_ = HostTensor(DType::F32, {4, 2, 1, 4});
  HostTensor q_ = HostTensor(DType::F32, {1, 1, 4});
  HostTensor k_ = HostTensor(DType::F32, {1, 1, 4});
  HostTensor out_ = HostTensor(DType::F32, {1, 1, 4});
  std::vector<std::int32_t> table_ = {3, 0};
  std::vector<std::int32_t> offsets_ = {0, 1};
  std::vector<std::int32_t> kv_lens_ = {3};
  KvView view_;
  LayerInputs inputs_;
};

// What only the attention finds wrong has to be found before an append.
TEST_F(OutOfRange, WhatAttendWouldRefuseIsCheckedWithoutIt) {
  const StepArrays step = {1, 1, offsets_.data(), kv_lens_.data()};
  const HostTensor out = out_;
  const auto check = [&] {
    return message_of([&] { check_attend(config_, view_, step, inputs_, out_.view()); });
  };
  EXPECT_EQ(check(), "none");
  EXPECT_TRUE(out_ == out);
  config_.backend = Backend::Flash2;
  EXPECT_THAT(check(), HasSubstr("flash2"));
  config_.backend = Backend::Auto;
  inputs_.q.shape[2] = 3;
  EXPECT_EQ(check(), "q.shape: wanted [>= 1, 1, 4] (thd), got [1, 1, 3]");
}

TEST_F(OutOfRange, PageIdBehindThePoolIsNamed) {
  table_[1] = 4;
  EXPECT_EQ(refused(), "cache.page_table[0, 1]: wanted 0 … 3, got 4");
}

TEST_F(OutOfRange, NegativePageIdIsNamed) {
  table_[0] = -1;
  EXPECT_EQ(refused(), "cache.page_table[0, 0]: wanted 0 … 3, got -1");
}

TEST_F(OutOfRange, LengthBeyondTheTableIsNamed) {
  kv_lens_[0] = 5;
  EXPECT_EQ(refused(), "step.kv_lens[0]: wanted 1 … 4, got 5 (new tokens included)");
}

TEST_F(OutOfRange, RowThatIsNotThereIsNamed) {
  const std::vector<std::int32_t> rows = {1};
  view_.row_indices = rows.data();
  EXPECT_EQ(refused(), "cache.row_indices[0]: wanted 0 … 0, got 1");
}

TEST_F(OutOfRange, RowsInOnePlaceAreNamed) {
  view_.num_rows = 2;
  view_.page_table_stride = 0;
  EXPECT_EQ(refused(), "cache.page_table_stride: wanted at least 1, got 0");
}

TEST_F(OutOfRange, OffsetsThatFallAreNamed) {
  offsets_[1] = -1;
  EXPECT_EQ(refused(), "step.token_offsets[1]: wanted at least 0, got -1 (prefix sums don't fall)");
}

TEST_F(OutOfRange, OffsetsThatDontAddUpAreNamed) {
  offsets_[1] = 2;
  EXPECT_EQ(refused(), "step.token_offsets[1]: wanted 1 (num_tokens), got 2");
}

// Partials over two parts of the keys, merged, against attention over all of them.
class Merged : public TestWithParam<Backend> {};

TEST_P(Merged, PartsGiveTheWholeWithSinksAppliedOnce) {
  const Case value = make_case(parse_spec("b1 q1 s99 steps2 hq4 hkv2 d16 f32 sinks seed75"));
  const CaseStep& prompt = value.steps[0];
  const CaseStep& step = value.steps[1];
  HostTensor k(DType::F32, {1, 100, 2, 16});
  HostTensor v(DType::F32, {1, 100, 2, 16});
  for (std::int64_t i = 0; i < k.size(); ++i) {
    const bool old = i < prompt.k.size();
    k.set(i, old ? prompt.k.get(i) : step.k.get(i - prompt.k.size()));
    v.set(i, old ? prompt.v.get(i) : step.v.get(i - prompt.v.size()));
  }
  AttentionConfig config = value.attention;
  config.backend = GetParam();
  config.mask = Mask::Full;
  LayerInputs inputs;
  inputs.q = step.q.view();
  std::vector<HostTensor> outs;
  std::vector<HostTensor> lses;
  std::vector<Partial> partials;
  // The middle part is empty: the neutral element.
  const std::int32_t borders[] = {0, 37, 37, 100};
  for (int part = 0; part < 3; ++part) {
    outs.emplace_back(DType::F32, std::vector<std::int64_t>{1, 4, 16});
    lses.emplace_back(DType::F32, std::vector<std::int64_t>{1, 4});
  }
  for (std::size_t part = 0; part < 3; ++part) {
    const std::int32_t begin = borders[part];
    const std::int32_t count = borders[part + 1] - begin;
    KvView view;
    view.k = TensorView(k.data() + begin * 32 * 4, DType::F32, {1, count, 2, 16});
    view.v = TensorView(v.data() + begin * 32 * 4, DType::F32, {1, count, 2, 16});
    if (count == 0) view.k.shape[1] = view.v.shape[1] = 1;
    const std::int32_t offsets[] = {0, 1};
    const TensorView lse = lses[part].view();
    attend(config, view, {1, 1, offsets, &count}, inputs, outs[part].view(), &lse);
    partials.push_back({outs[part].view(), lses[part].view()});
  }
  HostTensor out(DType::F32, {1, 4, 16});
  HostTensor lse(DType::F32, {1, 4});
  const TensorView lse_view = lse.view();
  merge(partials, out.view(), &lse_view, reinterpret_cast<const float*>(value.sinks->data()));
  Comparison result;
  compare_step(value, 1, out, lse, result);
  EXPECT_TRUE(result.ok()) << result.worst.to_string();
}

INSTANTIATE_TEST_SUITE_P(Backends, Merged, ValuesIn(usable_backends()), backend_name);

}  // namespace
}  // namespace octavo::conformance
