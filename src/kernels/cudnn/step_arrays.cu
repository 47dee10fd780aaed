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

/// The batch row that holds packed token `token`.
__device__ std::int32_t seq_of_token(const StepBatch& batch, std::int32_t token) {
  // A decode step has a token a sequence.
  const std::int32_t guess = min(token, batch.num_seqs - 1);
  if (batch.token_offsets[guess] <= token && token < batch.token_offsets[guess + 1]) return guess;
  std::int32_t low = 0;
  std::int32_t high = batch.num_seqs;  // token_offsets[low] <= token < token_offsets[high]
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    (batch.token_offsets[middle] <= token ? low : high) = middle;
  }
  return low;
}

/// One row of q or out, and whose it is.
struct TokenRow {
  std::int32_t b = 0;
  std::int32_t token = 0;  ///< Within the sequence.
  std::int32_t packed = 0;
  std::int64_t offset = 0;  ///< Elements.
  bool real = false;        ///< Not padding.
};

/// Rows are counted as they lie in memory: sbhd's by token, then sequence.
__device__ TokenRow locate(const StepBatch& batch, const TokenLayout& layout, std::int64_t row) {
  TokenRow found;
  if (layout.ragged) {
    found.offset = row * layout.token_stride;
    found.real = row < batch.token_offsets[batch.num_seqs];
    if (!found.real) return found;
    found.packed = static_cast<std::int32_t>(row);
    found.b = seq_of_token(batch, found.packed);
    found.token = found.packed - batch.token_offsets[found.b];
    return found;
  }
  const bool batch_outermost = layout.batch_stride >= layout.token_stride;
  const std::int64_t inner = batch_outermost ? layout.num_token_rows : layout.num_batch_rows;
  const auto outer_idx = static_cast<std::int32_t>(row / inner);
  const auto inner_idx = static_cast<std::int32_t>(row % inner);
  found.b = batch_outermost ? outer_idx : inner_idx;
  found.token = batch_outermost ? inner_idx : outer_idx;
  found.offset = found.b * layout.batch_stride + found.token * layout.token_stride;
  if (found.b >= batch.num_seqs) return found;
  found.packed = batch.token_offsets[found.b] + found.token;
  found.real = found.packed < batch.token_offsets[found.b + 1];
  return found;
}

__device__ KeyRange keys_of(const AttendParams& params, const TokenRow& row) {
  const StepBatch& batch = params.batch;
  const std::int32_t kv_len = batch.kv_lens[row.b];
  const std::int32_t q_len = batch.token_offsets[row.b + 1] - batch.token_offsets[row.b];
  return visible_keys(params.causal, params.window_left, params.window_right,
                      kv_len - q_len + row.token, kv_len);
}

/// Where the tokens of batch row b begin, of which `token` is the first in packed order.
__device__ std::int64_t offset_of(const TokenLayout& layout, std::int32_t b, std::int64_t token) {
  return layout.ragged ? token * layout.token_stride : b * layout.batch_stride;
}

__device__ void write_offsets(const AttendParams& params, const StepArrays& arrays, std::int32_t at,
                              std::int32_t b, std::int64_t token) {
  arrays.q_offsets[at] = offset_of(params.q_layout, b, token);
  arrays.out_offsets[at] = offset_of(params.out_layout, b, token);
  if (arrays.stats_offsets != nullptr) arrays.stats_offsets[at] = token * params.num_q_heads;
}

/// The batch row with new tokens whose keys lie in `page`, or num_seqs; found by the whole block.
__device__ std::int32_t seq_in_page(const StepBatch& batch, std::int32_t page) {
  __shared__ std::int32_t found;
  __syncthreads();  // the last one's has been read
  if (threadIdx.x == 0) found = batch.num_seqs;
  __syncthreads();
  for (auto b = static_cast<std::int32_t>(threadIdx.x); b < batch.num_seqs; b += kThreads) {
    const bool has_tokens = batch.token_offsets[b + 1] > batch.token_offsets[b];
    if (has_tokens && batch.kv_lens[b] > 0 && page_of(batch, b, 0) == page) found = b;
  }
  __syncthreads();
  return found;
}

/// One row of blocks for each of cuDNN's batch rows; the table's entries are spread over x.
__global__ void prepare_step_kernel(AttendParams params, PageCut cut, StepArrays arrays) {
  const StepBatch& batch = params.batch;
  for (auto r = static_cast<std::int32_t>(blockIdx.y); r < arrays.num_rows;
       r += static_cast<std::int32_t>(gridDim.y)) {
    std::int32_t b = arrays.kind == BatchRows::Pages ? seq_in_page(batch, r) : r;
    std::int32_t q_len = 0;
    std::int32_t kv_len = 0;
    std::int32_t first_token = batch.token_offsets[batch.num_seqs];
    if (arrays.kind == BatchRows::Tokens) {
      const TokenRow row = locate(batch, params.q_layout, r);
      b = row.b;
      if (row.real) {
        q_len = 1;
        kv_len = static_cast<std::int32_t>(keys_of(params, row).end);
      }
    } else if (b < batch.num_seqs) {
      first_token = batch.token_offsets[b];
      q_len = batch.token_offsets[b + 1] - first_token;
      kv_len = batch.kv_lens[b];
    }
    if (kv_len <= 0) q_len = kv_len = 0;  // finish_step writes rows that see nothing
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      arrays.q_lens[r] = q_len;
      arrays.kv_lens[r] = kv_len;
      if (arrays.q_offsets != nullptr) {
        write_offsets(params, arrays, r, min(b, batch.num_seqs), first_token);
        if (r == arrays.num_rows - 1) {
          write_offsets(params, arrays, r + 1, batch.num_seqs, batch.token_offsets[batch.num_seqs]);
        }
      }
    }
    if (arrays.k_table == nullptr) continue;
    const std::int32_t used = (kv_len + cut.slots - 1) / cut.slots;
    const std::int32_t row = used > 0 ? row_of(batch, b) : 0;
    const std::int32_t* table =
        batch.page_table != nullptr ? batch.page_table + row * batch.page_table_stride : nullptr;
    for (auto j = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
         j < arrays.table_width; j += static_cast<std::int32_t>(gridDim.x * kThreads)) {
      const std::int32_t entry = j < used ? j : 0;
      std::int32_t page = 0;
      if (used > 0) page = table != nullptr ? table[entry / cut.per_page] : row;
      const std::int32_t part = entry % cut.per_page;
      const std::int64_t at = static_cast<std::int64_t>(r) * arrays.table_width + j;
      arrays.k_table[at] = page * cut.k_ratio + part;
      if (arrays.v_table != nullptr) arrays.v_table[at] = page * cut.v_ratio + part;
    }
  }
}

/// One row of blocks for each sequence; the slots to clear are spread over x.
__global__ void clear_tails_kernel(StepBatch batch, PagedTensor v, std::int32_t page_size,
                                   std::int32_t num_heads, std::int32_t dim, std::int32_t tile) {
  for (auto b = static_cast<std::int32_t>(blockIdx.y); b < batch.num_seqs;
       b += static_cast<std::int32_t>(gridDim.y)) {
    const std::int32_t kv_len = batch.kv_lens[b];
    const std::int32_t used = kv_len % page_size;
    // Without a query nothing is read; and the last page may be shared with a longer sequence.
    if (used == 0 || batch.token_offsets[b + 1] == batch.token_offsets[b]) continue;
    const std::int32_t end = min((used + tile - 1) / tile * tile, page_size);
    const std::int32_t page = page_of(batch, b, kv_len / page_size);
    for (std::int32_t slot = used + static_cast<std::int32_t>(blockIdx.x); slot < end;
         slot += static_cast<std::int32_t>(gridDim.x)) {
      // 16-bit elements; zero has one pattern in both formats.
      auto* base =
          static_cast<std::uint16_t*>(v.data) + page * v.page_stride + slot * v.slot_stride;
      for (auto i = static_cast<std::int32_t>(threadIdx.x); i < num_heads * dim; i += kThreads)
        base[i / dim * v.head_stride + i % dim * v.dim_stride] = 0;
    }
  }
}

/// A warp for each row of the output, and for each row of the LSE behind the step's tokens.
__global__ void finish_step_kernel(AttendParams params, std::int64_t num_out_rows,
                                   const float* stats, StatsStrides strides) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const StepBatch& batch = params.batch;
  if (row < num_out_rows) {
    const TokenRow found = locate(batch, params.out_layout, row);
    bool sees = false;
    if (found.real) {
      const KeyRange keys = keys_of(params, found);
      sees = keys.begin < keys.end;
    }
    if (!sees) {
      auto* out = static_cast<std::uint16_t*>(params.out) + found.offset;
      for (std::int32_t i = lane; i < params.num_q_heads * params.head_dim_v; i += 32)
        out[i / params.head_dim_v * params.out_layout.head_stride + i % params.head_dim_v] = 0;
    }
    if (params.lse != nullptr && found.real) {
      float* lse = params.lse + found.packed * params.lse_token_stride;
      const std::int64_t first = strides.packed
                                     ? static_cast<std::int64_t>(found.packed) * params.num_q_heads
                                     : found.b * strides.seq + found.token * strides.token;
      for (std::int32_t h = lane; h < params.num_q_heads; h += 32) {
        lse[h * params.lse_head_stride] =
            sees ? stats[first + h * (strides.packed ? 1 : strides.head)] : -INFINITY;
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

void prepare_step(const AttendParams& params, const PageCut& cut, const StepArrays& arrays,
                  CUstream_st* stream) {
  const std::int32_t blocks = std::clamp((arrays.table_width + kThreads - 1) / kThreads, 1, 64);
  prepare_step_kernel<<<dim3(static_cast<unsigned>(blocks), grid_y(arrays.num_rows)), kThreads, 0,
                        stream>>>(params, cut, arrays);
  check_launch("prepare_step_kernel");
}

void clear_tails(const AttendParams& params, std::int32_t tile, CUstream_st* stream) {
  if (params.batch.num_seqs == 0) return;
  const auto blocks = static_cast<unsigned>(std::clamp(tile / 2, 1, 16));
  clear_tails_kernel<<<dim3(blocks, grid_y(params.batch.num_seqs)), kThreads, 0, stream>>>(
      params.batch, params.kv.v, params.kv.page_size, params.num_kv_heads, params.head_dim_v, tile);
  check_launch("clear_tails_kernel");
}

void finish_step(const AttendParams& params, const float* stats, const StatsStrides& strides,
                 CUstream_st* stream) {
  const TokenLayout& out = params.out_layout;
  const std::int64_t num_out_rows =
      out.ragged ? out.num_token_rows : out.num_batch_rows * out.num_token_rows;
  const std::int64_t rows =
      std::max(num_out_rows, params.lse != nullptr ? params.num_lse_rows : std::int64_t{0});
  if (rows == 0) return;
  const auto blocks = static_cast<unsigned>((rows + kWarps - 1) / kWarps);
  finish_step_kernel<<<blocks, kThreads, 0, stream>>>(params, num_out_rows, stats, strides);
  check_launch("finish_step_kernel");
}

}  // namespace octavo::kernels::fused
