// SPDX-License-Identifier: Apache-2.0
// Padding rows of an attention's outputs: 0 in the output, -inf in the LSE.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/step.cuh"

namespace octavo::kernels::cuda {
namespace {  // each family has its own instances

constexpr int kPadThreads = 256;

__global__ void __launch_bounds__(kPadThreads)
    pad_kernel(const __grid_constant__ AttendParams a, std::int64_t num_out_rows) {
  const TokenLayout& layout = a.out_layout;
  const std::int32_t total = a.batch.token_offsets[a.batch.num_seqs];
  const std::int64_t step = std::int64_t{gridDim.x} * (kPadThreads / static_cast<int>(kWarp));
  const std::int64_t first =
      std::int64_t{blockIdx.x} * (kPadThreads / static_cast<int>(kWarp)) + threadIdx.x / kWarp;
  const auto lane = static_cast<std::int32_t>(threadIdx.x % kWarp);
  for (std::int64_t row = first; row < num_out_rows; row += step) {
    std::int64_t to = row * layout.token_stride;
    bool padding = row >= total;
    if (!layout.ragged) {
      const auto b = static_cast<std::int32_t>(row / layout.num_token_rows);
      const std::int64_t i = row % layout.num_token_rows;
      to = b * layout.batch_stride + i * layout.token_stride;
      padding = b >= a.batch.num_seqs || i >= new_tokens(a.batch, b);
    }
    if (!padding) continue;
    for (std::int32_t w = lane; w < a.num_q_heads * a.head_dim_v; w += static_cast<int>(kWarp)) {
      store_element(
          a.out, a.out_dtype,
          to + w / a.head_dim_v * layout.head_stride + w % a.head_dim_v * layout.dim_stride, 0.0F);
    }
  }
  if (a.lse == nullptr) return;
  for (std::int64_t row = first; row < a.num_lse_rows; row += step) {
    if (row < total) continue;
    for (std::int32_t h = lane; h < a.num_q_heads; h += static_cast<int>(kWarp)) {
      a.lse[row * a.lse_token_stride + h * a.lse_head_stride] = -INFINITY;
    }
  }
}

int launch_pad(const AttendParams& params, CUstream_st* stream) {
  const TokenLayout& layout = params.out_layout;
  const std::int64_t rows =
      layout.ragged ? layout.num_token_rows : layout.num_token_rows * layout.num_batch_rows;
  const std::int64_t work = max(rows, params.num_lse_rows);
  if (work == 0) return 0;
  pad_kernel<<<grid_for(work, kPadThreads / static_cast<int>(kWarp)), kPadThreads, 0, stream>>>(
      params, rows);
  return launched();
}

}  // namespace
}  // namespace octavo::kernels::cuda
