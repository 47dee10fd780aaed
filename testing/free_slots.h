// SPDX-License-Identifier: Apache-2.0
// Keeps NaN in every slot of a cache that holds no token: whoever reads one shows it.
#pragma once

#include <octavo/cache.h>
#include <octavo/plan.h>

#include <cstdint>
#include <vector>

namespace octavo::testkit {

/// Knows which slots of a cache are poisoned already, so that a step costs what it touches.
class FreeSlots {
 public:
  /// `cache` must outlive it. Caches too large to fill are left alone.
  explicit FreeSlots(KvCache& cache);

  /// Fills every slot without a token. Not while a fork of a contiguous cache waits for its copy:
  /// the rows to be copied may lie behind the end of a sequence cut back since.
  void poison();

  /// A plan was made: what it may write to or clear counts as unpoisoned.
  void planned(const StepPlan& plan);

 private:
  void poison_slot(std::int64_t slot);

  KvCache& cache_;
  std::int64_t page_slots_ = 0;
  std::vector<bool> poisoned_;  ///< Slot by slot of the pool; empty: left alone.
};

}  // namespace octavo::testkit
