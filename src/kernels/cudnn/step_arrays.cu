// SPDX-License-Identifier: Apache-2.0
#include "kernels/cudnn/step_arrays.h"

#include <cuda_runtime_api.h>
#include <octavo/error.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace octavo::kernels::fused {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr std::int64_t kMaxGrid = 65535;  // of the y axis; more rows are walked by a stride

void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  throw Error(ErrorCode::DeviceFailure, std::string(kernel) + ": " + cudaGetErrorString(error));
}

__device__ std::int32_t row_of(const StepBatch& batch, std::int32_t b) {
  return batch.rows != nullptr ? batch.rows[b] : b;
}

/// One row of blocks for each sequence; the table's entries are spread over x.
__global__ void prepare_step_kernel(StepBatch batch, PageCut cut, std::int64_t q_stride,
                                    std::int64_t out_stride, std::int32_t num_q_heads,
                                    StepArrays arrays) {
  for (std::int32_t b = static_cast<std::int32_t>(blockIdx.y); b < arrays.num_seqs;
       b += static_cast<std::int32_t>(gridDim.y)) {
    const bool live = b < batch.num_seqs;
    const std::int32_t begin = batch.token_offsets[live ? b : batch.num_seqs];
    const std::int32_t end = live ? batch.token_offsets[b + 1] : begin;
    const std::int32_t kv_len = live ? batch.kv_lens[b] : 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      arrays.q_lens[b] = end - begin;
      arrays.kv_lens[b] = kv_len;
      if (arrays.q_offsets != nullptr) {
        arrays.q_offsets[b] = begin * q_stride;
        arrays.out_offsets[b] = begin * out_stride;
        if (b == arrays.num_seqs - 1) {
          arrays.q_offsets[b + 1] = end * q_stride;
          arrays.out_offsets[b + 1] = end * out_stride;
        }
        if (arrays.stats_offsets != nullptr) {
          arrays.stats_offsets[b] = static_cast<std::int64_t>(begin) * num_q_heads;
          if (b == arrays.num_seqs - 1)
            arrays.stats_offsets[b + 1] = static_cast<std::int64_t>(end) * num_q_heads;
        }
      }
    }
    if (arrays.k_table == nullptr) continue;
    const std::int32_t used = (kv_len + cut.slots - 1) / cut.slots;
    const std::int32_t row = live ? row_of(batch, b) : 0;
    const std::int32_t* table =
        batch.page_table != nullptr ? batch.page_table + row * batch.page_table_stride : nullptr;
    for (std::int32_t j = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
         j < arrays.table_width; j += static_cast<std::int32_t>(gridDim.x * kThreads)) {
      const std::int32_t entry = j < used ? j : 0;
      std::int32_t page = 0;
      if (used > 0) page = table != nullptr ? table[entry / cut.per_page] : row;
      const std::int32_t part = entry % cut.per_page;
      const std::int64_t at = static_cast<std::int64_t>(b) * arrays.table_width + j;
      arrays.k_table[at] = page * cut.k_ratio + part;
      if (arrays.v_table != nullptr) arrays.v_table[at] = page * cut.v_ratio + part;
    }
  }
}

__device__ void clear_slot(const PagedTensor& tensor, std::int32_t page, std::int32_t slot,
                           std::int32_t num_heads, std::int32_t dim) {
  // 16-bit elements; zero has one pattern in both formats.
  auto* base = static_cast<std::uint16_t*>(tensor.data) + page * tensor.page_stride +
               slot * tensor.slot_stride;
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < num_heads * dim;
       i += static_cast<std::int32_t>(blockDim.x))
    base[i / dim * tensor.head_stride + i % dim * tensor.dim_stride] = 0;
}

__global__ void clear_tails_kernel(StepBatch batch, KvPages kv, std::int32_t num_kv_heads,
                                   std::int32_t head_dim, std::int32_t head_dim_v,
                                   std::int32_t tile) {
  for (std::int32_t b = static_cast<std::int32_t>(blockIdx.y); b < batch.num_seqs;
       b += static_cast<std::int32_t>(gridDim.y)) {
    const std::int32_t kv_len = batch.kv_lens[b];
    const std::int32_t used = kv_len % kv.page_size;
    if (used == 0) continue;
    const std::int32_t end = min((used + tile - 1) / tile * tile, kv.page_size);
    const std::int32_t row = row_of(batch, b);
    const std::int32_t page =
        batch.page_table != nullptr
            ? batch.page_table[row * batch.page_table_stride + kv_len / kv.page_size]
            : row;
    for (std::int32_t slot = used + static_cast<std::int32_t>(blockIdx.x); slot < end;
         slot += static_cast<std::int32_t>(gridDim.x)) {
      clear_slot(kv.k, page, slot, num_kv_heads, head_dim);
      clear_slot(kv.v, page, slot, num_kv_heads, head_dim_v);
    }
  }
}

/// The batch row that holds packed token `token`.
__device__ std::int32_t seq_of_token(const StepBatch& batch, std::int32_t token) {
  std::int32_t low = 0;
  std::int32_t high = batch.num_seqs;  // token_offsets[low] <= token < token_offsets[high]
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    (batch.token_offsets[middle] <= token ? low : high) = middle;
  }
  return low;
}

struct OutRow {
  std::int32_t b = 0;
  std::int32_t token = 0;  ///< Within the sequence.
  std::int32_t packed = 0;
  std::int64_t offset = 0;  ///< Elements.
  bool real = false;
};

__device__ OutRow locate(const AttendParams& params, std::int64_t row) {
  const StepBatch& batch = params.batch;
  const TokenLayout& layout = params.out_layout;
  OutRow found;
  if (layout.ragged) {
    found.offset = row * layout.token_stride;
    found.real = row < batch.token_offsets[batch.num_seqs];
    if (!found.real) return found;
    found.packed = static_cast<std::int32_t>(row);
    found.b = seq_of_token(batch, found.packed);
    found.token = found.packed - batch.token_offsets[found.b];
    return found;
  }
  found.b = static_cast<std::int32_t>(row / layout.num_token_rows);
  found.token = static_cast<std::int32_t>(row % layout.num_token_rows);
  found.offset = found.b * layout.batch_stride + found.token * layout.token_stride;
  if (found.b >= batch.num_seqs) return found;
  found.packed = batch.token_offsets[found.b] + found.token;
  found.real = found.packed < batch.token_offsets[found.b + 1];
  return found;
}

__device__ bool sees_keys(const AttendParams& params, const OutRow& row) {
  const StepBatch& batch = params.batch;
  const std::int64_t kv_len = batch.kv_lens[row.b];
  const std::int32_t q_len = batch.token_offsets[row.b + 1] - batch.token_offsets[row.b];
  const std::int64_t position = kv_len - q_len + row.token;
  const std::int64_t first =
      params.window_left >= 0 ? max(position - params.window_left, std::int64_t{0}) : 0;
  std::int64_t end = kv_len;
  if (params.causal) end = min(end, position + 1);
  if (params.window_right >= 0) end = min(end, position + params.window_right + 1);
  return first < end;
}

/// A warp for each row of the output, and for each row of the LSE behind the step's tokens.
__global__ void finish_step_kernel(AttendParams params, std::int64_t num_out_rows,
                                   const float* stats, std::int64_t stats_q_len) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const StepBatch& batch = params.batch;
  if (row < num_out_rows) {
    const OutRow found = locate(params, row);
    const bool sees = found.real && sees_keys(params, found);
    if (!sees) {
      auto* out = static_cast<std::uint16_t*>(params.out) + found.offset;
      for (std::int32_t i = lane; i < params.num_q_heads * params.head_dim_v; i += 32)
        out[i / params.head_dim_v * params.out_layout.head_stride + i % params.head_dim_v] = 0;
    }
    if (params.lse != nullptr && found.real) {
      float* lse = params.lse + found.packed * params.lse_token_stride;
      for (std::int32_t h = lane; h < params.num_q_heads; h += 32) {
        const std::int64_t at =
            params.out_layout.ragged
                ? static_cast<std::int64_t>(found.packed) * params.num_q_heads + h
                : (static_cast<std::int64_t>(found.b) * params.num_q_heads + h) * stats_q_len +
                      found.token;
        lse[h * params.lse_head_stride] = sees ? stats[at] : -INFINITY;
      }
    }
  }
  if (params.lse != nullptr && row < params.num_lse_rows &&
      row >= batch.token_offsets[batch.num_seqs]) {
    float* lse = params.lse + row * params.lse_token_stride;
    for (std::int32_t h = lane; h < params.num_q_heads; h += 32)
      lse[h * params.lse_head_stride] = -INFINITY;
  }
}

unsigned grid_y(std::int64_t rows) {
  return static_cast<unsigned>(std::clamp<std::int64_t>(rows, 1, kMaxGrid));
}

}  // namespace

void prepare_step(const StepBatch& batch, const PageCut& cut, const TokenLayout& q,
                  const TokenLayout& out, std::int32_t num_q_heads, const StepArrays& arrays,
                  CUstream_st* stream) {
  const std::int32_t blocks = std::clamp((arrays.table_width + kThreads - 1) / kThreads, 1, 64);
  prepare_step_kernel<<<dim3(static_cast<unsigned>(blocks), grid_y(arrays.num_seqs)), kThreads, 0,
                        stream>>>(batch, cut, q.token_stride, out.token_stride, num_q_heads,
                                  arrays);
  check_launch("prepare_step_kernel");
}

void clear_tails(const StepBatch& batch, const KvPages& kv, std::int32_t num_kv_heads,
                 std::int32_t head_dim, std::int32_t head_dim_v, std::int32_t tile,
                 CUstream_st* stream) {
  if (batch.num_seqs == 0) return;
  const auto blocks = static_cast<unsigned>(std::clamp(tile / 2, 1, 16));
  clear_tails_kernel<<<dim3(blocks, grid_y(batch.num_seqs)), kThreads, 0, stream>>>(
      batch, kv, num_kv_heads, head_dim, head_dim_v, tile);
  check_launch("clear_tails_kernel");
}

void finish_step(const AttendParams& params, const float* stats, std::int64_t stats_q_len,
                 CUstream_st* stream) {
  const TokenLayout& out = params.out_layout;
  const std::int64_t num_out_rows =
      out.ragged ? out.num_token_rows : out.num_batch_rows * out.num_token_rows;
  const std::int64_t rows =
      std::max(num_out_rows, params.lse != nullptr ? params.num_lse_rows : std::int64_t{0});
  if (rows == 0) return;
  const auto blocks = static_cast<unsigned>((rows + kWarps - 1) / kWarps);
  finish_step_kernel<<<blocks, kThreads, 0, stream>>>(params, num_out_rows, stats, stats_q_len);
  check_launch("finish_step_kernel");
}

}  // namespace octavo::kernels::fused
