// SPDX-License-Identifier: Apache-2.0
// The GPU's side of a cache and of the calls, for the rooms that see no CUDA. Implemented in cuda/
// and, for builds without nvcc, in no_cuda/, where making one refuses.
#pragma once

#include <octavo/cache.h>
#include <octavo/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/params.h"
#include "plan/plan_data.h"

namespace octavo::dispatch {

/// The storage of a cache: layer 0, and the way to the next.
struct GpuStorage {
  kernels::KvPages pages;
  std::int64_t k_layer_stride = 0;  ///< Elements.
  std::int64_t v_layer_stride = 0;
};

/// What a cache keeps on its GPU beside keys and values: the begun step at fixed addresses, the
/// ring through which steps are uploaded, the workspace, the state of the backends. All of it is
/// made once. Calls enqueue on `stream` and are made with the device current.
class GpuCache {
 public:
  virtual ~GpuCache() = default;

  /// Uploads the plan and runs its page copies. One upload as long as a step changes at most
  /// kEntriesPerUpload entries. Waits only when the ring is full of steps not yet run.
  virtual void begin(const detail::PlanData& plan, const GpuStorage& storage, Stream stream) = 0;

  /// The begun step, in device memory.
  [[nodiscard]] virtual kernels::StepBatch batch(const detail::PlanData& plan) const = 0;

  virtual void append(const kernels::AppendParams& params, Stream stream) = 0;

  /// Throws InvalidArgument when the workspace is too small for what attend would be told.
  /// Builds what the backend prepares for sizes that it has not met yet.
  virtual void check_attend(Backend backend, const kernels::AttendParams& params,
                            const kernels::StepBatch& host) = 0;

  /// Attends with the backend named. `host` holds the lengths of `params.batch` in host memory.
  virtual void attend(Backend backend, const kernels::AttendParams& params,
                      const kernels::StepBatch& host, Stream stream) = 0;
};

/// Page-table entries, and page copies, that one buffer of the ring holds.
inline constexpr std::int32_t kEntriesPerUpload = 1 << 16;
inline constexpr std::int32_t kCopiesPerUpload = 1 << 12;

/// Throws OutOfMemory, DeviceFailure, NotCompiled.
std::unique_ptr<GpuCache> make_gpu_cache(const CacheConfig& config, std::int32_t max_pages_per_seq);

/// Bytes of workspace that a cache takes when it is not told, and the fewest it takes.
std::size_t default_gpu_workspace(const CacheConfig& config);
std::size_t least_gpu_workspace(const CacheConfig& config);

/// Tokens from format to format, pages to rows; the device is current.
void convert_on_gpu(const kernels::ConvertParams& params, Stream stream);
void gather_on_gpu(const kernels::GatherParams& params, Stream stream);

}  // namespace octavo::dispatch
