// SPDX-License-Identifier: Apache-2.0
// The kernels around an attention: the cut before it, the combination behind it.
#include "kernels/cuda/flash2/cut.cuh"

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/pad.cuh"
#include "kernels/cuda/flash2/combine.cuh"

namespace octavo::kernels::flash2 {
namespace {

__global__ void __launch_bounds__(kCutThreads) cut_kernel(const __grid_constant__ Work work) {
  __shared__ CutState state_smem;
  cut_block(work, state_smem);
}

__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ Work work) {
  constexpr int kHeads = kCombineThreads / kLanes;
  const std::int64_t groups = (work.attend.num_q_heads + kHeads - 1) / kHeads;
  const std::int64_t all = work.attend.batch.num_tokens * groups;
  for (std::int64_t i = blockIdx.x; i < all; i += gridDim.x)
    combine_heads(work, i / groups, static_cast<int>(i % groups) * kHeads);
}

}  // namespace

int cut_step(const Work& work, CUstream_st* stream) {
  cut_kernel<<<1, kCutThreads, 0, stream>>>(work);
  return cuda::launched();
}

int combine_partials(const Work& work, CUstream_st* stream) {
  const unsigned blocks = cuda::grid_for(work.attend.batch.num_tokens * work.attend.num_q_heads,
                                         kCombineThreads / kLanes);
  combine_kernel<<<blocks, kCombineThreads, 0, stream>>>(work);
  return cuda::launched();
}

int pad_rows(const AttendParams& params, CUstream_st* stream) {
  return cuda::launch_pad(params, stream);
}

}  // namespace octavo::kernels::flash2
