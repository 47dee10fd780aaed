// SPDX-License-Identifier: Apache-2.0
#include "plan/planner.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "base/error.h"
#include "base/math.h"

namespace octavo::plan {

std::uint64_t Planner::next_cache_id() {
  static std::atomic<std::uint64_t> newest{0};
  return ++newest;
}

std::shared_ptr<detail::PlanData> Planner::unused_plan() {
  for (const auto& plan : plans_) {
    if (plan.use_count() == 1) {
      std::atomic_thread_fence(
          std::memory_order_acquire);  // another thread may have dropped the last handle
      return plan;
    }
  }
  plans_.push_back(std::make_shared<detail::PlanData>());
  return plans_.back();
}

PlanOutcome Planner::plan(cache::SequenceStore& store, std::span<const SequenceStep> step) {
  std::int64_t num_tokens = 0;
  for (const SequenceStep& line : step) {
    if (line.new_tokens > 0 && __builtin_add_overflow(num_tokens, line.new_tokens, &num_tokens)) {
      num_tokens = std::numeric_limits<std::int64_t>::max();
    }
  }
  constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();
  if (num_tokens > kMaxTokens) {
    base::throw_mismatch("step", fmt::format("at most {} new tokens", kMaxTokens), num_tokens);
  }

  const std::shared_ptr<detail::PlanData> plan =
      unused_plan();  // may allocate: before the store changes
  const std::size_t num_seqs = step.size();
  plan->ids.resize(num_seqs);
  plan->rows.resize(num_seqs);
  plan->token_offsets.resize(num_seqs + 1);
  plan->past_lens.resize(num_seqs);
  plan->kv_lens.resize(num_seqs);
  plan->first_entries.resize(num_seqs);
  plan->entry_offsets.resize(num_seqs + 1);
  plan->clear_lens.resize(num_seqs);

  if (auto shortage = store.reserve(step)) return PlanOutcome(std::move(shortage));
  try {
    const auto lines = store.reservations();
    plan->cache_id = cache_id_;
    plan->version = store.version();
    plan->page_size = store.config().page_size;
    plan->max_new_tokens = 0;
    plan->max_kv_len = 0;
    plan->memory.clear();
    plan->entries.clear();
    plan->token_offsets[0] = 0;
    plan->entry_offsets[0] = 0;
    for (std::size_t b = 0; b < num_seqs; ++b) {
      const cache::Reservation& line = lines[b];
      const std::int32_t new_tokens = line.new_len - line.past_len;
      plan->ids[b] = step[b].id;
      plan->rows[b] = line.row;
      plan->token_offsets[b + 1] = plan->token_offsets[b] + new_tokens;
      plan->past_lens[b] = line.past_len;
      plan->kv_lens[b] = line.new_len;
      plan->first_entries[b] = line.first_entry;
      plan->clear_lens[b] = line.clear_len;
      plan->max_new_tokens = std::max(plan->max_new_tokens, new_tokens);
      plan->max_kv_len = std::max(plan->max_kv_len, line.new_len);
      const auto pages =
          store.pages_of_row(line.row).subspan(static_cast<std::size_t>(line.first_entry));
      for (const std::int32_t page : pages) plan->entries.push_back(page);
      plan->entry_offsets[b + 1] = static_cast<std::int32_t>(plan->entries.size());
    }
    plan->num_tokens = plan->token_offsets[num_seqs];
    const auto copies = store.pending_copies();
    plan->copies.assign(copies.begin(), copies.end());
  } catch (...) {
    store.undo_reservation();
    throw;
  }
  return PlanOutcome(StepPlan(plan));
}

}  // namespace octavo::plan
