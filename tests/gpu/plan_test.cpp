// SPDX-License-Identifier: Apache-2.0
// The planning kernel against the host's planner, and against the same rules repeated on the host;
// what it makes of arrays that are wrong.
#include "kernels/cuda/plan/plan.h"
#include "testing/random.h"
#include "tests/gpu/gpu_test.h"

#include <octavo/cache.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace octavo::gpu_tests {
namespace {

using kernels::CallersStep;
using kernels::TokenIndex;
using kernels::TokenSlot;
using kernels::cuda::Fault;
using kernels::cuda::is_page;
using kernels::cuda::length_fault;
using kernels::cuda::offset_fault;
using kernels::cuda::PlanFault;
using kernels::cuda::PlannedStep;
using kernels::cuda::slot_without_page;

constexpr std::int32_t kNoPage = 2'147'480'000;

/// A caller's arrays in host memory.
struct Arrays {
  std::vector<std::int32_t> token_offsets, kv_lens, rows, table;
  std::int32_t page_size = 16;
  std::int32_t width = 0;  // of a table row
  std::int32_t num_pages = 0;
  StepMaxima maxima;

  [[nodiscard]] CallersStep step() const {
    CallersStep s;
    s.batch.num_seqs = static_cast<std::int32_t>(kv_lens.size());
    s.batch.num_tokens = maxima.num_tokens;
    s.batch.token_offsets = token_offsets.data();
    s.batch.kv_lens = kv_lens.data();
    s.batch.rows = rows.empty() ? nullptr : rows.data();
    s.batch.page_table = table.empty() ? nullptr : table.data();
    s.batch.page_table_stride = width;
    s.num_pages = num_pages;
    s.num_rows = table.empty() ? num_pages : static_cast<std::int32_t>(table.size()) / width;
    s.page_size = page_size;
    s.max_slots = table.empty() ? page_size : std::int64_t{width} * page_size;
    s.maxima = maxima;
    return s;
  }
};

/// What the kernel leaves as it was.
constexpr std::int32_t kUntouched = 0x25A5A5A5;
constexpr TokenSlot kNoSlot{kUntouched, kUntouched, kUntouched, kUntouched};
constexpr TokenIndex kNoIndex{kUntouched, kUntouched};

struct Planned {
  explicit Planned(const CallersStep& step)
      : token_offsets(static_cast<std::size_t>(step.batch.num_seqs) + 1, 0),
        kv_lens(static_cast<std::size_t>(step.batch.num_seqs), 0),
        rows(static_cast<std::size_t>(step.batch.num_seqs), 0),
        faults(token_offsets.size()),
        token_slots(static_cast<std::size_t>(step.maxima.num_tokens), kNoSlot),
        token_indices(static_cast<std::size_t>(step.maxima.num_tokens), kNoIndex) {}

  std::vector<std::int32_t> token_offsets, kv_lens, rows;
  std::vector<PlanFault> faults;
  std::vector<TokenSlot> token_slots;
  std::vector<TokenIndex> token_indices;

  friend bool operator==(const Planned&, const Planned&) = default;
};

/// What the kernel is to write, in plain loops.
Planned plan_on_host(const CallersStep& step) {
  const std::int32_t n = step.batch.num_seqs;
  const auto size = static_cast<std::size_t>(n);
  Planned planned(step);
  for (std::int32_t b = 0; b < n && planned.faults[size].kind == Fault::None; ++b) {
    planned.faults[size] =
        offset_fault(step, b, step.batch.token_offsets[b], step.batch.token_offsets[b + 1]);
  }
  const bool has_tokens = planned.faults[size].kind == Fault::None;
  for (std::int32_t b = 0; b < n; ++b) {
    const auto at = static_cast<std::size_t>(b);
    const std::int32_t kv_len = step.batch.kv_lens[b];
    const std::int32_t row = step.batch.rows != nullptr ? step.batch.rows[b] : b;
    PlanFault fault = length_fault(step, kv_len, row);
    for (std::int32_t i = 0; fault.kind == Fault::None && step.batch.page_table != nullptr &&
                             std::int64_t{i} * step.page_size < kv_len;
         ++i) {
      const std::int32_t page = step.batch.page_table[row * step.batch.page_table_stride + i];
      if (!is_page(step, page)) fault = {Fault::Page, i, page};
    }
    planned.faults[at] = fault;
    const bool good = has_tokens && fault.kind == Fault::None && kv_len > 0;
    if (good) {
      planned.kv_lens[at] = kv_len;
      planned.rows[at] = row;
    }
    if (!has_tokens) continue;
    const std::int32_t begin = step.batch.token_offsets[b];
    const std::int32_t num_new = step.batch.token_offsets[b + 1] - begin;
    planned.token_offsets[at + 1] = begin + num_new;
    for (std::int32_t i = 0; i < num_new; ++i) {
      TokenSlot slot = slot_without_page(step, good ? kv_len : 0, num_new, i);
      if (slot.page >= 0) slot.page = page_of(step.batch, b, slot.position / step.page_size);
      planned.token_slots[static_cast<std::size_t>(begin + i)] = slot;
      planned.token_indices[static_cast<std::size_t>(begin + i)] = {b, i};
    }
  }
  return planned;
}

Planned plan_on_gpu(const Arrays& arrays) {
  CallersStep step = arrays.step();
  std::vector<testkit::DeviceMemory> memory;
  const auto upload = [&](const std::vector<std::int32_t>& values) -> const std::int32_t* {
    if (values.empty()) return nullptr;
    memory.emplace_back(kGpu, values.size() * sizeof(std::int32_t));
    memory.back().upload(values.data(), memory.back().size());
    return reinterpret_cast<const std::int32_t*>(memory.back().data());
  };
  step.batch.token_offsets = upload(arrays.token_offsets);
  step.batch.kv_lens = upload(arrays.kv_lens);
  step.batch.rows = upload(arrays.rows);
  step.batch.page_table = upload(arrays.table);
  Planned planned(step);
  const auto room = [&](auto& values) {
    memory.emplace_back(kGpu, std::max<std::size_t>(values.size() * sizeof(values[0]), 4));
    memory.back().upload(values.data(), values.size() * sizeof(values[0]));
    return reinterpret_cast<std::remove_reference_t<decltype(values[0])>*>(memory.back().data());
  };
  const PlannedStep to{.token_offsets = room(planned.token_offsets),
                       .kv_lens = room(planned.kv_lens),
                       .rows = room(planned.rows),
                       .faults = room(planned.faults),
                       .token_slots = room(planned.token_slots),
                       .token_indices = room(planned.token_indices)};
  EXPECT_EQ(kernels::cuda::plan_step(step, to, nullptr), 0);
  const auto read = [&](auto& values, const void* from) {
    if (!values.empty())
      testkit::read_device(kGpu, values.data(), from, values.size() * sizeof(values[0]));
  };
  read(planned.token_offsets, to.token_offsets);
  read(planned.kv_lens, to.kv_lens);
  read(planned.rows, to.rows);
  read(planned.faults, to.faults);
  read(planned.token_slots, to.token_slots);
  read(planned.token_indices, to.token_indices);
  return planned;
}

/// A cache's plan as a caller with the same pages would say it: table rows in use, all other
/// entries no pages at all.
Arrays arrays_of(const KvCache& cache, const StepPlan& plan) {
  const CacheConfig& c = cache.config();
  Arrays arrays;
  arrays.page_size = c.page_size;
  arrays.num_pages = static_cast<std::int32_t>(c.num_pages);
  arrays.width = static_cast<std::int32_t>((c.max_seq_len + c.page_size - 1) / c.page_size);
  arrays.table.assign(static_cast<std::size_t>(c.max_num_seqs * arrays.width), kNoPage);
  arrays.token_offsets.assign(plan.token_offsets().begin(), plan.token_offsets().end());
  arrays.kv_lens.assign(plan.kv_lens().begin(), plan.kv_lens().end());
  arrays.rows.assign(plan.rows().begin(), plan.rows().end());
  for (std::size_t b = 0; b < arrays.rows.size(); ++b) {
    const std::vector<std::int32_t> pages = cache.page_ids(plan.ids()[b]);
    std::copy(pages.begin(), pages.end(),
              arrays.table.begin() + std::int64_t{arrays.rows[b]} * arrays.width);
  }
  arrays.maxima = {.num_seqs = plan.num_seqs(),
                   .num_tokens = plan.num_tokens() + 5,
                   .max_new_tokens = plan.max_new_tokens(),
                   .max_kv_len = static_cast<std::int32_t>(c.max_seq_len)};
  return arrays;
}

struct Size {
  std::int32_t num_seqs;
  std::int32_t page_size;
  std::int64_t max_seq_len;
};

/// Two steps of a cache on the host, lengths at random, sequences in another order the second time.
Arrays random_arrays(const Size& size, StepPlan& plan) {
  testkit::Random random(static_cast<std::uint64_t>(size.num_seqs));
  CacheConfig c;
  c.num_kv_heads = 1;
  c.head_dim = 1;
  c.dtype = DType::F16;
  c.max_num_seqs = size.num_seqs;
  c.page_size = size.page_size;
  c.max_seq_len = size.max_seq_len;
  KvCache cache(c);
  std::vector<SequenceStep> lines;
  for (SequenceId id = 0; id < size.num_seqs; ++id)
    lines.push_back({id, random.integer(0, size.max_seq_len / 2)});
  cache.begin(cache.plan(lines).plan());
  std::reverse(lines.begin(), lines.end());
  for (SequenceStep& line : lines) line.new_tokens = random.integer(0, 3);
  plan = cache.plan(lines).plan();
  return arrays_of(cache, plan);
}

class DevicePlan : public GpuTestWith<Size> {};

TEST_P(DevicePlan, IsTheHostPlanners) {
  StepPlan plan;
  const Arrays arrays = random_arrays(GetParam(), plan);
  const Planned got = plan_on_gpu(arrays);
  EXPECT_TRUE(std::equal(got.token_offsets.begin(), got.token_offsets.end(),
                         plan.token_offsets().begin(), plan.token_offsets().end()));
  EXPECT_TRUE(std::equal(got.kv_lens.begin(), got.kv_lens.end(), plan.kv_lens().begin(),
                         plan.kv_lens().end()));
  for (std::size_t b = 0; b < got.rows.size(); ++b) {
    if (got.kv_lens[b] > 0) {
      ASSERT_EQ(got.rows[b], plan.rows()[b]) << b;
    }
  }
  EXPECT_TRUE(got == plan_on_host(arrays.step()));
  std::size_t token = 0;
  for (std::int32_t b = 0; b < plan.num_seqs(); ++b) {
    const auto at = static_cast<std::size_t>(b);
    for (std::int32_t i = 0; i < plan.token_offsets()[at + 1] - plan.token_offsets()[at]; ++i) {
      const TokenSlot& slot = got.token_slots[token++];
      ASSERT_EQ(std::int64_t{slot.page} * plan.page_size() + slot.slot, plan.slot(b, i));
      ASSERT_EQ(slot.position, plan.position(b, i));
    }
  }
  ASSERT_EQ(token + 5, got.token_slots.size());  // padding
}

TEST_P(DevicePlan, TakesOutTheSequencesThatAreWrong) {
  StepPlan plan;
  Arrays arrays = random_arrays(GetParam(), plan);
  testkit::Random random(7);
  for (std::size_t b = 0; b < arrays.kv_lens.size(); ++b) {
    const std::int32_t width = arrays.width;
    switch (random.integer(0, 6)) {
      case 0:
        arrays.rows[b] = random.integer(0, 1) == 0 ? -1 : kNoPage;
        break;
      case 1:
        arrays.kv_lens[b] = random.integer(0, 1) == 0 ? -3 : kNoPage;
        break;
      case 2:
        arrays.table[static_cast<std::size_t>(arrays.rows[b] * width +
                                              random.integer(0, std::int64_t{width} - 1))] = -1;
        break;
      case 3:
        arrays.table[static_cast<std::size_t>(arrays.rows[b] * width)] = arrays.num_pages;
        break;
      case 4:  // no fault: new tokens before the sequence are not written
        arrays.kv_lens[b] = 1;
        break;
      default:
        break;
    }
  }
  EXPECT_TRUE(plan_on_gpu(arrays) == plan_on_host(arrays.step()));
}

TEST_P(DevicePlan, HasNoTokensWhereOffsetsFall) {
  StepPlan plan;
  Arrays arrays = random_arrays(GetParam(), plan);
  arrays.token_offsets.back() = -1;
  const Planned got = plan_on_gpu(arrays);
  EXPECT_TRUE(got == plan_on_host(arrays.step()));
  EXPECT_EQ(got.token_offsets, std::vector<std::int32_t>(arrays.token_offsets.size(), 0));
  EXPECT_EQ(got.kv_lens, std::vector<std::int32_t>(arrays.kv_lens.size(), 0));
}

INSTANTIATE_TEST_SUITE_P(Sizes, DevicePlan,
                         ::testing::Values(Size{1, 16, 100}, Size{1, 1, 20'000}, Size{2, 3, 50},
                                           Size{7, 16, 5'000}, Size{33, 64, 1'000},
                                           Size{256, 16, 4'096}, Size{256, 1, 4'093},
                                           Size{1'000, 7, 300}, Size{10'000, 16, 128}));

TEST(PlanRules, PutNoTokenBeforeTheSequence) {
  CallersStep step;
  step.page_size = 2;
  EXPECT_TRUE(slot_without_page(step, 3, 4, 0) == TokenSlot{});
  EXPECT_TRUE(slot_without_page(step, 3, 4, 3) == (TokenSlot{0, 0, 2, 0}));
  EXPECT_TRUE(slot_without_page(step, 0, 1, 0) == TokenSlot{});
}

// One sequence of 3 tokens, 1 of them new, in a pool of 4 pages of 2 slots.
Arrays small() {
  Arrays arrays;
  arrays.token_offsets = {0, 1};
  arrays.kv_lens = {3};
  arrays.rows = {1};
  arrays.table = {kNoPage, kNoPage, 3, 0};
  arrays.page_size = 2;
  arrays.width = 2;
  arrays.num_pages = 4;
  arrays.maxima = {.num_seqs = 1, .num_tokens = 2, .max_new_tokens = 2, .max_kv_len = 4};
  return arrays;
}

TEST(PlanRules, TakeAGoodStep) {
  const Planned planned = plan_on_host(small().step());
  EXPECT_EQ(planned.faults, std::vector<PlanFault>(2));
  EXPECT_EQ(planned.kv_lens, std::vector<std::int32_t>{3});
  EXPECT_EQ(planned.rows, std::vector<std::int32_t>{1});
}

PlanFault only_fault(const Arrays& arrays) {
  const Planned planned = plan_on_host(arrays.step());
  EXPECT_EQ(planned.kv_lens, std::vector<std::int32_t>{0});
  return planned.faults[planned.faults[0].kind == Fault::None ? 1 : 0];
}

TEST(PlanRules, NameAPageOutsideThePool) {
  Arrays arrays = small();
  arrays.table[3] = 4;
  EXPECT_EQ(only_fault(arrays), (PlanFault{Fault::Page, 1, 4}));
}

TEST(PlanRules, LeaveEntriesBehindTheLastPageAlone) {
  Arrays arrays = small();
  arrays.kv_lens = {2};
  arrays.table[3] = kNoPage;
  EXPECT_EQ(plan_on_host(arrays.step()).faults, std::vector<PlanFault>(2));
}

TEST(PlanRules, NameARowOutsideTheTable) {
  Arrays arrays = small();
  arrays.rows = {2};
  EXPECT_EQ(only_fault(arrays), (PlanFault{Fault::Row, 0, 2}));
}

TEST(PlanRules, NameALengthBeyondTheRowOrTheMaximum) {
  Arrays arrays = small();
  arrays.kv_lens = {5};
  EXPECT_EQ(only_fault(arrays), (PlanFault{Fault::Length, 0, 5}));
  arrays = small();
  arrays.maxima.max_kv_len = 2;
  EXPECT_EQ(only_fault(arrays), (PlanFault{Fault::Length, 0, 3}));
}

TEST(PlanRules, NameOffsetsThatFallOrPassTheMaxima) {
  Arrays arrays = small();
  arrays.token_offsets = {0, -1};
  EXPECT_EQ(only_fault(arrays), (PlanFault{Fault::FallingOffset, 1, -1}));
  arrays.token_offsets = {1, 2};
  EXPECT_EQ(only_fault(arrays), (PlanFault{Fault::FirstOffset, 0, 1}));
  arrays.token_offsets = {0, 3};
  EXPECT_EQ(only_fault(arrays), (PlanFault{Fault::NewTokens, 0, 3}));
  arrays.maxima.max_new_tokens = 5;
  EXPECT_EQ(only_fault(arrays), (PlanFault{Fault::NumTokens, 1, 3}));
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  arrays.token_offsets = {0, kMost};
  EXPECT_EQ(only_fault(arrays), (PlanFault{Fault::NewTokens, 0, kMost}));
}

}  // namespace
}  // namespace octavo::gpu_tests
