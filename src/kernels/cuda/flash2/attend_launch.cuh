// SPDX-License-Identifier: Apache-2.0
// The kernel around attend_block, and its launch: what each instance's file has.
#pragma once

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/flash2/attend.cuh"

namespace octavo::kernels::flash2 {
namespace {

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads)
    attend_kernel(const __grid_constant__ Work work,
                  const __grid_constant__ Frequencies frequencies) {
  extern __shared__ __align__(128) unsigned char tiles_smem[];
  attend_block<T, kDim>(work, frequencies, tiles_smem);
}

template <typename T, int kDim>
int launch_attend(const Work& work, const Frequencies& frequencies, CUstream_st* stream) {
  constexpr int kBytes = TileShape<kDim>::kSmemBytes;
  const cudaError_t status = cudaFuncSetAttribute(
      attend_kernel<T, kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return static_cast<int>(status);
  const dim3 grid(static_cast<unsigned>(work.max_items),
                  static_cast<unsigned>(work.tiling.head_tiles));
  attend_kernel<T, kDim><<<grid, kThreads, kBytes, stream>>>(work, frequencies);
  return cuda::launched();
}

template <int kDim>
int launch_dim(const Work& work, const Frequencies& frequencies, CUstream_st* stream) {
  if (work.attend.kv.dtype == DType::F16)
    return launch_attend<__half, kDim>(work, frequencies, stream);
  return launch_attend<__nv_bfloat16, kDim>(work, frequencies, stream);
}

}  // namespace
}  // namespace octavo::kernels::flash2
