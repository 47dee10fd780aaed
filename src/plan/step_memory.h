// SPDX-License-Identifier: Apache-2.0
// What a step's layers compute once and share: it follows from the plan and what the layers ask
// for. Forgetting it keeps its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/schedule.h"

namespace octavo::plan {

/// Arrays of the step's tokens for RoPE, one for each pair of rotary_dim and base.
class TurnSet {
 public:
  /// `count` floats, which `fill(float*)` writes when they are first asked for. The count follows
  /// from the step and rotary_dim.
  template <typename FillT>
  const float* get(std::int32_t rotary_dim, double base, std::size_t count, FillT fill) {
    for (std::size_t i = 0; i < num_used_; ++i) {
      const Turns& turns = turns_[i];
      if (turns.rotary_dim == rotary_dim && turns.base == base) return turns.values.data();
    }
    if (num_used_ == turns_.size()) turns_.emplace_back();
    Turns& turns = turns_[num_used_];
    turns.rotary_dim = rotary_dim;
    turns.base = base;
    turns.values.resize(count);
    fill(turns.values.data());
    ++num_used_;
    return turns.values.data();
  }
  void clear() { num_used_ = 0; }

 private:
  struct Turns {
    std::int32_t rotary_dim = 0;
    double base = 0.0;
    std::vector<float> values;
  };
  std::vector<Turns> turns_;
  std::size_t num_used_ = 0;
};

struct StepMemory {
  ScheduleSet schedules;
  TurnSet turns;

  void clear() {
    schedules.clear();
    turns.clear();
  }
};

}  // namespace octavo::plan
