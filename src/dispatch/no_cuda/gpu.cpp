// SPDX-License-Identifier: Apache-2.0
// A build without the CUDA part: whatever asks for a GPU is refused with the reason.
#include "dispatch/gpu.h"

#include "base/error.h"
#include "device/gpu.h"

namespace octavo::dispatch {

std::unique_ptr<GpuCache> make_gpu_cache(const CacheConfig& config,
                                         std::int32_t /*max_pages_per_seq*/) {
  device::require_gpu(config.device, "device");
  return nullptr;
}

std::unique_ptr<GpuWorkspace> make_gpu_workspace(Device device) {
  device::require_gpu(device, "device");
  return nullptr;
}

std::size_t least_call_bytes(Backend /*backend*/, const kernels::AttendParams& /*params*/,
                             const kernels::StepLengths& /*lengths*/, Device device) {
  device::require_gpu(device, "device");
  return 0;
}

std::size_t default_gpu_workspace(const CacheConfig& /*config*/) { return 0; }
std::size_t least_gpu_workspace(const CacheConfig& /*config*/) { return 0; }

void convert_on_gpu(const kernels::ConvertParams& /*params*/, Stream /*stream*/) {
  device::require_gpu({DeviceType::Cuda, 0}, "device");
}
void gather_on_gpu(const kernels::GatherParams& /*params*/, Stream /*stream*/) {
  device::require_gpu({DeviceType::Cuda, 0}, "device");
}
void locate_on_gpu(const kernels::ListedParams& /*params*/, Stream /*stream*/) {
  device::require_gpu({DeviceType::Cuda, 0}, "device");
}

}  // namespace octavo::dispatch
