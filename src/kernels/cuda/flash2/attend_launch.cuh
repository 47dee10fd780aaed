// SPDX-License-Identifier: Apache-2.0
// The kernel around attend_block, and its launch: what each instance's file has.
#pragma once

#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/flash2/attend.cuh"

namespace octavo::kernels::flash2 {
namespace {

template <typename T, typename ConfigT>
__global__ void __launch_bounds__(ConfigT::kThreads, ConfigT::kBlocks)
    attend_kernel(const __grid_constant__ Work work,
                  const __grid_constant__ FrequencyTable<ConfigT::kDim / 2> frequencies) {
  extern __shared__ __align__(128) unsigned char tiles_smem[];
  __shared__ BlockState<ConfigT> state_smem;
  attend_block<T, ConfigT>(work, {frequencies.values}, state_smem, tiles_smem);
}

template <typename T, typename ConfigT>
int launch_attend(const Work& work, const Frequencies& frequencies, CUstream_st* stream) {
  constexpr int kBytes = ConfigT::kSmemBytes;
  const cudaError_t status = cudaFuncSetAttribute(
      attend_kernel<T, ConfigT>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return static_cast<int>(status);
  FrequencyTable<ConfigT::kDim / 2> table;
  std::copy_n(frequencies.values, ConfigT::kDim / 2, table.values);
  const std::int64_t blocks = work.max_items * work.tiling.head_tiles + work.max_slots;
  attend_kernel<T, ConfigT>
      <<<cuda::grid_for(blocks, 1), ConfigT::kThreads, kBytes, stream>>>(work, table);
  return cuda::launched();
}

template <typename ConfigT>
int launch_instance(const Work& work, const Frequencies& frequencies, CUstream_st* stream) {
  if (work.attend.kv.dtype == DType::F16)
    return launch_attend<__half, ConfigT>(work, frequencies, stream);
  return launch_attend<__nv_bfloat16, ConfigT>(work, frequencies, stream);
}

}  // namespace
}  // namespace octavo::kernels::flash2
