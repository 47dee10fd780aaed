// SPDX-License-Identifier: Apache-2.0
// The GPU's side of a cache and of the calls, for the rooms that see no CUDA. Implemented in cuda/
// and, for builds without nvcc, in no_cuda/, where making one refuses.
#pragma once

#include <octavo/cache.h>
#include <octavo/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "dispatch/features.h"
#include "kernels/params.h"
#include "plan/plan_data.h"

namespace octavo::dispatch {

/// The storage of a cache: layer 0, and the way to the next.
struct GpuStorage {
  kernels::KvPages pages;
  std::int64_t k_layer_stride = 0;  ///< Elements.
  std::int64_t v_layer_stride = 0;
};

/// Bytes of workspace that a call runs with, and with which it runs well.
struct CallSizes {
  std::size_t least = 0;
  std::size_t good = 0;
};

/// What a cache keeps on its GPU beside keys and values: the begun step at fixed addresses, the
/// ring through which steps are uploaded, the workspace, the state of the backends. All of it is
/// made once. Calls enqueue on `stream` and are made with the device current.
class GpuCache {
 public:
  virtual ~GpuCache() = default;

  /// Uploads the plan and runs its page copies. One upload as long as a step changes at most
  /// kEntriesPerUpload entries. Waits for nothing as long as at most 8 uploads are not yet run.
  virtual void begin(const detail::PlanData& plan, const GpuStorage& storage, Stream stream) = 0;

  /// The begun step, in device memory, as kernels for so many sequences and tokens see it.
  [[nodiscard]] virtual kernels::StepBatch batch(std::int32_t num_seqs,
                                                 std::int32_t num_tokens) const = 0;

  virtual void append(const kernels::AppendParams& params, Stream stream) = 0;

  /// The workspace that attend would want, and what there is. Builds what the backend prepares for
  /// sizes that it has not met yet.
  virtual WorkspaceBytes workspace_for(Backend backend, const kernels::AttendParams& params,
                                       const kernels::StepLengths& lengths) = 0;

  /// Attends with the backend named, after workspace_for. `lengths` are those of `params.batch`.
  virtual void attend(Backend backend, const kernels::AttendParams& params,
                      const kernels::StepLengths& lengths, Stream stream) = 0;

  /// Work that was enqueued without a call of this object, a replayed graph's, used the workspace.
  virtual void workspace_used() = 0;
};

/// What a workspace for caches of the caller's has on a GPU: the planned step, the caller's memory,
/// the state of the backends. Takes no memory of a GPU itself.
class GpuWorkspace {
 public:
  virtual ~GpuWorkspace() = default;

  /// Bytes for the planned step and what a backend needs beside it.
  virtual CallSizes sizes(Backend backend, const kernels::AttendParams& params,
                          const StepMaxima& maxima) = 0;
  virtual void use(void* memory, std::size_t num_bytes) = 0;

  /// Enqueues the plan of a step. Throws InvalidArgument when the memory is too small for it.
  virtual void plan(const kernels::CallersStep& step, Stream stream) = 0;
  /// The step that was planned last; null before.
  [[nodiscard]] virtual const kernels::CallersStep* planned() const = 0;
  /// Its arrays, in device memory.
  [[nodiscard]] virtual kernels::StepBatch batch() const = 0;
  /// Waits for the stream. What was wrong with the planned step, first of all; empty if nothing.
  [[nodiscard]] virtual std::string fault(Stream stream) = 0;

  virtual void append(const kernels::AppendParams& params, Stream stream) = 0;
  /// As GpuCache's.
  virtual WorkspaceBytes workspace_for(Backend backend, const kernels::AttendParams& params) = 0;
  virtual void attend(Backend backend, const kernels::AttendParams& params, Stream stream) = 0;
};

/// Throws DeviceFailure, NotCompiled, InvalidArgument.
std::unique_ptr<GpuWorkspace> make_gpu_workspace(Device device);

/// The fewest bytes of workspace with which `backend`, flash2 or unfused, runs such a call; the
/// device is current.
std::size_t least_call_bytes(Backend backend, const kernels::AttendParams& params,
                             const kernels::StepLengths& lengths, Device device);

/// Page-table entries, and page copies, that one buffer of the ring holds.
inline constexpr std::int32_t kEntriesPerUpload = 1 << 16;
inline constexpr std::int32_t kCopiesPerUpload = 1 << 12;

/// Throws OutOfMemory, DeviceFailure, NotCompiled.
std::unique_ptr<GpuCache> make_gpu_cache(const CacheConfig& config, std::int32_t max_pages_per_seq);

/// Bytes of workspace that a cache takes when it is not told, and the fewest it takes.
std::size_t default_gpu_workspace(const CacheConfig& config);
std::size_t least_gpu_workspace(const CacheConfig& config);

/// Tokens from format to format, pages to rows, tokens to their pages; the device is current.
void convert_on_gpu(const kernels::ConvertParams& params, Stream stream);
void gather_on_gpu(const kernels::GatherParams& params, Stream stream);
void locate_on_gpu(const kernels::ListedParams& params, Stream stream);

}  // namespace octavo::dispatch
