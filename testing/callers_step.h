// SPDX-License-Identifier: Apache-2.0
// A step of one of our own caches as a caller who manages its pages himself would tell it: pages,
// table and lengths, on the host or on a GPU.
#pragma once

#include "testing/device_memory.h"

#include <octavo/attention.h>
#include <octavo/cache.h>
#include <octavo/plan.h>
#include <octavo/workspace.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace octavo::testkit {

/// What outlives the steps of a replay over a caller's cache.
class CallersWorkspace {
 public:
  explicit CallersWorkspace(Device device) {
    if (device.type == DeviceType::Cuda) workspace_.emplace(device);
  }

  /// Null on the CPU.
  [[nodiscard]] Workspace* get() { return workspace_ ? &*workspace_ : nullptr; }

  /// Room for such a call; waits for the device when it has to grow.
  void fit(const AttentionConfig& config, const KvView& view, const StepArrays& step,
           const LayerInputs& inputs, const TensorView& out, const TensorView* lse);

 private:
  std::optional<Workspace> workspace_;
  DeviceMemory memory_;
};

class CallersStep {
 public:
  /// The begun step of the cache.
  CallersStep(KvCache& cache, const StepPlan& plan, CallersWorkspace& workspace);
  CallersStep(const CallersStep&) = delete;
  CallersStep& operator=(const CallersStep&) = delete;

  [[nodiscard]] KvView view(std::int32_t layer) const;
  [[nodiscard]] const StepArrays& arrays() const { return arrays_; }

  /// Appends, then attends, by the functions for callers' caches.
  void run(const AttentionConfig& config, std::int32_t layer, const LayerInputs& inputs,
           const TensorView& out, const TensorView* lse);

 private:
  [[nodiscard]] const std::int32_t* placed(const std::vector<std::int32_t>& values);

  KvCache& cache_;
  CallersWorkspace& workspace_;
  std::int32_t width_;  // of a table row
  std::vector<std::int32_t> offsets_, kv_lens_, rows_, table_;
  std::vector<DeviceMemory> on_gpu_;
  const std::int32_t* placed_table_ = nullptr;
  const std::int32_t* placed_rows_ = nullptr;
  StepArrays arrays_;
  bool planned_ = false;
};

}  // namespace octavo::testkit
