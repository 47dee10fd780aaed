// SPDX-License-Identifier: Apache-2.0
// What a StepPlan holds. The arrays are described at StepPlan's accessors.
#pragma once

#include <octavo/plan.h>

#include <cstdint>
#include <vector>

#include "plan/step_memory.h"

namespace octavo::detail {

struct PlanData {
  std::uint64_t cache_id = 0;
  std::uint64_t version = 0;
  std::int32_t page_size = 0;
  std::int32_t num_tokens = 0;
  std::int32_t max_new_tokens = 0;
  std::int32_t max_kv_len = 0;
  std::vector<SequenceId> ids;
  std::vector<std::int32_t> rows;
  std::vector<std::int32_t> token_offsets;
  std::vector<std::int32_t> past_lens;
  std::vector<std::int32_t> kv_lens;
  std::vector<std::int32_t> first_entries;
  std::vector<std::int32_t> entry_offsets;
  std::vector<std::int32_t> entries;
  std::vector<std::int32_t> clear_lens;
  std::vector<PageCopy> copies;

  /// Follows from the rest, so it is no part of what the plan says. Used by the thread that the
  /// cache belongs to.
  mutable plan::StepMemory memory;
};

}  // namespace octavo::detail
