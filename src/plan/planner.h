// SPDX-License-Identifier: Apache-2.0
// From a reserved step to its plan. Keeps the memory of plans that nobody holds any more, so that
// steady state allocates nothing.
#pragma once

#include <octavo/plan.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache/sequence_store.h"
#include "plan/plan_data.h"

namespace octavo::plan {

class Planner {
 public:
  /// Reserves the step in `store` and writes down what it needs, or returns what is missing.
  PlanOutcome plan(cache::SequenceStore& store, std::span<const SequenceStep> step);

  /// Tells the plans of one cache from those of others; never 0.
  [[nodiscard]] std::uint64_t cache_id() const { return cache_id_; }

 private:
  std::shared_ptr<detail::PlanData> unused_plan();

  std::uint64_t cache_id_ = next_cache_id();
  std::vector<std::shared_ptr<detail::PlanData>> plans_;

  static std::uint64_t next_cache_id();
};

}  // namespace octavo::plan
