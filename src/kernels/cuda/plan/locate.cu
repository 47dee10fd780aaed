// SPDX-License-Identifier: Apache-2.0
// Where listed tokens lie: a thread for each. Bound by three dependent loads.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/plan/plan.h"

namespace octavo::kernels::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    locate_tokens_kernel(const __grid_constant__ ListedParams p) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = first; i < p.num_tokens; i += step) {
    const ListedPlace place = place_of_listed(p, static_cast<std::int32_t>(i));
    p.rows[i] = place.row;
    p.kv_lens[i] = place.kv_len;
  }
}

}  // namespace

int locate_tokens(const ListedParams& params, CUstream_st* stream) {
  locate_tokens_kernel<<<grid_for(params.num_tokens, kThreads), kThreads, 0, stream>>>(params);
  return launched();
}

}  // namespace octavo::kernels::cuda
