// SPDX-License-Identifier: Apache-2.0
// Append and attention of all layers, captured once as a CUDA graph and replayed for many steps.
#pragma once

#include <octavo/attention.h>
#include <octavo/cache.h>
#include <octavo/export.h>
#include <octavo/plan.h>
#include <octavo/tensor.h>
#include <octavo/types.h>

#include <memory>
#include <optional>
#include <span>

namespace octavo {

namespace detail {
struct GraphedStepImpl;
}

/// One layer's tensors: at the same places for every replay, and large enough for the maxima.
struct LayerTensors {
  LayerInputs inputs;  ///< `maxima` is not looked at.
  TensorView out;
  std::optional<TensorView> lse;
};

/// A step of a GPU's cache as one graph.
///
/// Each step is: KvCache::plan, KvCache::begin, new numbers into the inputs, `replay`. Lengths,
/// pages and which sequences there are may differ from step to step, within the maxima. Kernels
/// are chosen by the maxima alone, so `unfused` computes as much for every step. Rows beyond a step
/// write nothing to the cache and give 0, their LSE -inf.
///
/// Those who capture more than attention (the whole model, say) do without this class: they call
/// Attention::forward with LayerInputs::maxima under their own capture, after the same call outside
/// it, and hold the steps to the maxima themselves.
///
/// Thread safety: as the cache's.
class OCTAVO_EXPORT GraphedStep {
 public:
  /// Captures layer i of the cache for each `layers[i]`; enqueues nothing. The cache stays alive,
  /// and the tensors, as long as this is replayed; the attention need not.
  ///
  /// Errors: NotCompiled in a build without the CUDA part; InvalidArgument for a cache that is not
  /// a GPU's, maxima that the cache can't hold, or whatever Attention::forward refuses;
  /// Unsupported.
  GraphedStep(const Attention& attention, KvCache& cache, const StepMaxima& maxima,
              std::span<const LayerTensors> layers);
  ~GraphedStep();
  GraphedStep(GraphedStep&&) noexcept;
  GraphedStep& operator=(GraphedStep&&) noexcept;

  /// Runs all layers of a step. Errors: InvalidArgument, before anything is enqueued, when the plan
  /// is not the one that the cache began last, or exceeds a maximum, or the stream is another
  /// device's. Sync: enqueues on `stream`.
  void replay(const StepPlan& plan, Stream stream = {});

  [[nodiscard]] const StepMaxima& maxima() const noexcept;
  /// The backend that was captured.
  [[nodiscard]] Backend backend() const noexcept;

 private:
  std::unique_ptr<detail::GraphedStepImpl> impl_;
};

}  // namespace octavo
