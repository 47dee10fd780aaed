// SPDX-License-Identifier: Apache-2.0
// Scatter: a thread for each sequence and for each page-table entry; bound by the latency of one
// read over the bus. Copies: bound by memory; a block moves a part of one page of one layer's K or
// V, 16 bytes a thread where strides allow.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/step/step.h"

namespace octavo::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kChunksPerBlock = 4 * kThreads;

__global__ void scatter_step_kernel(const __grid_constant__ ScatterParams p) {
  const std::int64_t begin = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  if (p.has_sequences) {
    for (std::int64_t b = begin; b < p.to.max_num_seqs; b += stride) {
      const bool live = b < p.num_seqs;
      p.to.rows[b] = live ? p.rows[b] : 0;
      p.to.kv_lens[b] = live ? p.kv_lens[b] : 0;
      p.to.clear_lens[b] = live ? p.clear_lens[b] : 0;
      p.to.token_offsets[b + 1] = live ? p.token_offsets[b + 1] : p.num_tokens;
    }
    if (begin == 0) p.to.token_offsets[0] = 0;
  }
  for (std::int64_t e = begin; e < p.num_entries; e += stride) {
    p.to.page_table[p.entry_places[e]] = p.entry_values[e];
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
  const std::int64_t work =
      max(params.has_sequences ? params.to.max_num_seqs : 0, params.num_entries);
  scatter_step_kernel<<<min(grid_for(work, kThreads), 512U), kThreads, 0, stream>>>(params);
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
