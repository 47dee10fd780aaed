// SPDX-License-Identifier: Apache-2.0
#include "dispatch/cuda/backend_calls.h"

#include <algorithm>

#include "base/error.h"
#include "device/gpu.h"
#include "dispatch/features.h"

namespace octavo::dispatch {

std::size_t least_unfused_bytes(const kernels::AttendParams& params,
                                const kernels::StepLengths& lengths) {
  return kernels::cuda::least_unfused_bytes(params.num_q_heads / params.num_kv_heads,
                                            params.head_dim, params.head_dim_v,
                                            kernels::maxima_of(lengths).max_kv_len);
}

BackendCalls::BackendCalls(Device device)
    : flash2_(device,
              block_smem_of_environment(device::require_gpu(device, "device").block_smem_bytes)),
      fused_(device) {}

std::size_t BackendCalls::least_bytes(Backend backend, const kernels::AttendParams& params,
                                      const kernels::StepLengths& lengths) {
  if (backend == Backend::Fused) return fused_.bytes(params, lengths);
  if (backend == Backend::Flash2) return flash2_.workspace_bytes(params, lengths);
  OCTAVO_CHECK(backend == Backend::Unfused);
  return least_unfused_bytes(params, lengths);
}

std::size_t BackendCalls::good_bytes(Backend backend, const kernels::AttendParams& params,
                                     const kernels::StepLengths& lengths) {
  const std::size_t least = least_bytes(backend, params, lengths);
  if (backend != Backend::Unfused) return least;
  return std::max(least,
                  std::min(kernels::cuda::whole_unfused_bytes(params, lengths), kGoodWorkspace));
}

void BackendCalls::attend(Backend backend, const kernels::AttendParams& params,
                          const kernels::StepLengths& lengths, void* workspace,
                          std::size_t workspace_bytes, Stream stream) {
  if (backend == Backend::Fused) {
    fused_.attend(params, lengths, workspace, workspace_bytes, stream);
  } else if (backend == Backend::Flash2) {
    fused_.new_step();  // the workspace is shared
    flash2_.attend(params, lengths, workspace, stream.handle);
  } else {
    OCTAVO_CHECK(backend == Backend::Unfused);
    fused_.new_step();
    unfused_.attend(params, lengths, workspace, workspace_bytes, stream.handle);
  }
  device::sync_if_asked(stream, "attend");
}

}  // namespace octavo::dispatch
