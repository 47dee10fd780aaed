// SPDX-License-Identifier: Apache-2.0
// Scatter: a thread for each new token and for each page-table entry; bound by the latency of two
// reads over the bus. Copies: bound by memory; a block moves a part of one page of one layer's K or
// V, 16 bytes a thread where strides allow.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/step.cuh"
#include "kernels/cuda/step/step.h"

namespace octavo::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kChunksPerBlock = 4 * kThreads;

/// What a block looks at: the sequences of a lane each.
constexpr int kGroup = static_cast<int>(kWarp);
constexpr std::int64_t kWorkPerBlock = 4 * kThreads;

struct Group {
  std::int32_t token_offsets[kGroup + 1];
  std::int32_t entry_offsets[kGroup + 1];
  std::int32_t first_entries[kGroup];
  std::int32_t kv_lens[kGroup];
  std::int32_t rows[kGroup];
  std::int32_t clear_lens[kGroup];
};

/// The last of `count` > 0 sequences that begins at or before `at`.
__device__ int sequence_at(const std::int32_t* offsets, int count, std::int32_t at) {
  int low = 0;
  for (int high = count; high - low > 1;) {
    const int middle = (low + high) / 2;
    (offsets[middle] <= at ? low : high) = middle;
  }
  return low;
}

/// Every array by a warp of its own, so that all arrive after one trip over the bus.
__device__ void load_group(const ScatterParams& p, std::int32_t first, int count, Group& group) {
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  const auto load = [&](std::int32_t* to, const std::int32_t* from, int size) {
    for (int s = lane; s < size; s += kGroup) to[s] = from[first + s];
  };
  switch (threadIdx.x / kWarp) {
    case 0:
      return load(group.token_offsets, p.token_offsets, count + 1);
    case 1:
      return load(group.entry_offsets, p.entry_offsets, count + 1);
    case 2:
      return load(group.first_entries, p.first_entries, count);
    case 3:
      return load(group.kv_lens, p.kv_lens, count);
    case 4:
      return load(group.rows, p.rows, count);
    case 5:
      return load(group.clear_lens, p.clear_lens, count);
    default:
      return;
  }
}

/// Blocks are [groups of sequences, parts of their tokens and entries].
__global__ void __launch_bounds__(kThreads)
    scatter_step_kernel(const __grid_constant__ ScatterParams p) {
  __shared__ Group group;
  const auto first = static_cast<std::int32_t>(blockIdx.x) * kGroup;
  const int count = max(0, min(kGroup, p.num_seqs - first));
  load_group(p, first, count, group);
  const auto thread = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  const auto threads = static_cast<int>(gridDim.y * kThreads);
  for (std::int64_t b = p.num_seqs + std::int64_t{blockIdx.x} * threads + thread;
       b < p.to.max_num_seqs; b += std::int64_t{gridDim.x} * threads) {
    p.to.rows[b] = 0;
    p.to.kv_lens[b] = 0;
    p.to.clear_lens[b] = 0;
    p.to.token_offsets[b + 1] = p.num_tokens;
  }
  if (blockIdx.x == 0 && thread == 0) p.to.token_offsets[0] = 0;
  __syncthreads();
  if (thread < count) {
    p.to.rows[first + thread] = group.rows[thread];
    p.to.kv_lens[first + thread] = group.kv_lens[thread];
    p.to.clear_lens[first + thread] = group.clear_lens[thread];
    p.to.token_offsets[first + thread + 1] = group.token_offsets[thread + 1];
  }
  if (count == 0) return;

  const std::int32_t end_entry = p.first_entry + p.num_entries;
  for (std::int32_t e = max(group.entry_offsets[0], p.first_entry) + thread;
       e < min(group.entry_offsets[count], end_entry); e += threads) {
    const int s = sequence_at(group.entry_offsets, count, e);
    p.to.page_table[group.rows[s] * p.to.page_table_stride + group.first_entries[s] + e -
                    group.entry_offsets[s]] = p.entries[e - p.first_entry];
  }
#pragma unroll 2
  for (std::int32_t token = group.token_offsets[0] + thread; token < group.token_offsets[count];
       token += threads) {
    const int s = sequence_at(group.token_offsets, count, token);
    const std::int32_t i = token - group.token_offsets[s];
    const std::int32_t behind = group.token_offsets[s + 1] - token;  // this one included
    const std::int32_t position = group.kv_lens[s] - behind;
    const std::int32_t page_idx = position / p.page_size;
    // Every page that a step writes to is among its entries.
    const std::int32_t e = group.entry_offsets[s] + page_idx - group.first_entries[s];
    if (e < p.first_entry || e >= end_entry) continue;
    p.to.token_slots[token] = {p.entries[e - p.first_entry], position - page_idx * p.page_size,
                               position, behind == 1 ? group.clear_lens[s] : 0};
    p.to.token_indices[token] = {first + s, i};
  }
}

template <typename T>
__device__ void copy_part(const PagedTensor& tensor, std::int64_t layer_offset, std::int32_t heads,
                          std::int32_t dim, const PageCopy& copy) {
  T* data = static_cast<T*>(tensor.data) + layer_offset;
  const T* from = data + copy.source * tensor.page_stride;
  T* to = data + copy.destination * tensor.page_stride;
  const std::int64_t per_slot = std::int64_t{heads} * dim;
  const std::int64_t all = copy.num_slots * per_slot;
  for (std::int64_t c = std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x; c < all;
       c += std::int64_t{gridDim.y} * blockDim.x) {
    const std::int64_t slot = c / per_slot;
    const auto rest = static_cast<std::int32_t>(c - slot * per_slot);
    const std::int64_t at = slot * tensor.slot_stride + rest / dim * tensor.head_stride +
                            rest % dim * tensor.dim_stride;
    to[at] = from[at];
  }
}

/// Strides and dims of `p` are in units of T.
template <typename T>
__global__ void copy_pages_kernel(const __grid_constant__ PageCopyParams p) {
  const std::int64_t units = std::int64_t{p.num_copies} * p.num_layers * 2;
  for (std::int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const PageCopy copy = p.copies[unit / 2 / p.num_layers];
    const std::int64_t layer = unit / 2 % p.num_layers;
    if (unit % 2 == 0) {
      copy_part<T>(p.k, layer * p.k_layer_stride, p.num_kv_heads, p.head_dim, copy);
    } else {
      copy_part<T>(p.v, layer * p.v_layer_stride, p.num_kv_heads, p.head_dim_v, copy);
    }
  }
}

/// In units of `count` elements.
PageCopyParams widened(PageCopyParams p, std::int64_t count) {
  for (PagedTensor* tensor : {&p.k, &p.v}) {
    tensor->page_stride /= count;
    tensor->slot_stride /= count;
    tensor->head_stride /= count;
  }
  p.k_layer_stride /= count;
  p.v_layer_stride /= count;
  p.head_dim /= static_cast<std::int32_t>(count);
  p.head_dim_v /= static_cast<std::int32_t>(count);
  return p;
}

}  // namespace

int scatter_step(const ScatterParams& params, CUstream_st* stream) {
  const std::int64_t work = max(params.num_tokens, params.num_entries);
  const dim3 grid(grid_for(params.num_seqs, kGroup), min(grid_for(work, kWorkPerBlock), 64U));
  scatter_step_kernel<<<grid, kThreads, 0, stream>>>(params);
  return launched();
}

int copy_pages(const PageCopyParams& params, CUstream_st* stream) {
  const std::int64_t size = params.element_bytes;
  const auto fits = [&](const PagedTensor& t, std::int64_t layer_stride, std::int64_t dim) {
    return t.dim_stride == 1 &&
           is_aligned(t.data, size, t.page_stride, t.slot_stride, t.head_stride, layer_stride, dim);
  };
  const bool wide = fits(params.k, params.k_layer_stride, params.head_dim) &&
                    fits(params.v, params.v_layer_stride, params.head_dim_v);
  const PageCopyParams p = wide ? widened(params, 16 / size) : params;
  const std::int64_t chunks =
      std::int64_t{p.most_slots} * p.num_kv_heads * max(p.head_dim, p.head_dim_v);
  const dim3 grid(grid_for(std::int64_t{p.num_copies} * p.num_layers * 2, 1),
                  min(grid_for(chunks, kChunksPerBlock), 256U));
  if (wide) {
    copy_pages_kernel<uint4><<<grid, kThreads, 0, stream>>>(p);
  } else if (size == 4) {
    copy_pages_kernel<std::uint32_t><<<grid, kThreads, 0, stream>>>(p);
  } else {
    copy_pages_kernel<std::uint16_t><<<grid, kThreads, 0, stream>>>(p);
  }
  return launched();
}

}  // namespace octavo::kernels::cuda
