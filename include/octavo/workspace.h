// SPDX-License-Identifier: Apache-2.0
// What attention over a caller's cache in a GPU's memory needs beside its tensors: memory, and the
// plan of the step.
#pragma once

#include <octavo/attention.h>
#include <octavo/export.h>
#include <octavo/tensor.h>
#include <octavo/types.h>

#include <cstdint>
#include <memory>

namespace octavo {

namespace detail {
struct WorkspaceImpl;
}

/// Bytes.
struct WorkspaceSizes {
  std::int64_t least = 0;  ///< With fewer a call is refused.
  std::int64_t good = 0;   ///< More gains little.
};

/// The workspace of one stream of steps. Takes no memory of the GPU itself but for what the
/// backends' libraries take.
///
/// A step is: `plan`, then append_tokens and attend for each layer, with StepArrays::workspace set.
/// All of it, plan included, may be captured in a graph, which then serves every step within the
/// maxima whose arrays lie at the same places: a replay plans by itself. Calls outside the graph
/// plan again after one.
///
/// Thread safety: one thread at a time; work that uses one workspace is ordered, by one stream or
/// by events.
class OCTAVO_EXPORT Workspace {
 public:
  /// Errors: NotCompiled for a build without the CUDA part; InvalidArgument for the CPU, which
  /// needs none, and for a GPU that is not there; DeviceFailure when there is none.
  explicit Workspace(Device device);
  ~Workspace();
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;

  /// What such a call takes, the plan included. Of `step` the maxima are looked at. Builds what the
  /// backend prepares for them, so it comes before a capture.
  ///
  /// Errors: as attend's.
  [[nodiscard]] WorkspaceSizes sizes(const AttentionConfig& config, const KvView& cache,
                                     const StepArrays& step, const LayerInputs& inputs,
                                     const TensorView& out, const TensorView* lse = nullptr);

  /// Memory of the device, for all calls from now on; aligned to 256 bytes. It outlives their work.
  /// Errors: InvalidArgument.
  void use(void* memory, std::int64_t num_bytes);

  /// Reads the step's arrays and the page table in device memory and plans the step for all layers,
  /// whose K and V may lie anywhere. One launch, in stream order.
  ///
  /// A sequence that has a row outside the table, a length outside 0 … max_kv_len or a page id
  /// outside the pool is taken to be empty: it writes nothing and gives 0 and -inf. Offsets that
  /// fall, or that pass the maxima, make the whole step empty. `check` names the first fault.
  ///
  /// Errors: InvalidArgument, before anything is enqueued. Sync: enqueues on `stream`.
  void plan(const KvView& cache, const StepArrays& step, Stream stream = {});

  /// Throws InvalidArgument for the first fault of the step planned last. Sync: waits for `stream`;
  /// for debugging, and not under capture.
  void check(Stream stream = {}) const;

  [[nodiscard]] Device device() const noexcept;

  /// For the library's own rooms.
  [[nodiscard]] detail::WorkspaceImpl& impl() noexcept { return *impl_; }

 private:
  std::unique_ptr<detail::WorkspaceImpl> impl_;
};

}  // namespace octavo
