// SPDX-License-Identifier: Apache-2.0
// Pages to contiguous rows, through the page table. Memory-bound: 16 bytes a thread where dtypes
// agree and strides allow. Behind a sequence's end nothing is read, so that whatever lies there
// (NaN too) stays out of products.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/step.cuh"

namespace octavo::kernels::cuda {
namespace {  // each family has its own instances

constexpr int kGatherThreads = 256;

enum class Unit { Vector, Element };

template <Unit kUnit>
__global__ void __launch_bounds__(kGatherThreads)
    gather_pages_kernel(const __grid_constant__ GatherParams p) {
  const std::int32_t size = static_cast<std::int32_t>(p.to_dtype == DType::F32 ? 4 : 2);
  const std::int32_t width = kUnit == Unit::Vector ? kVectorBytes / size : 1;
  const std::int32_t units = p.padded_dim / width;
  const std::int64_t per_slot = std::int64_t{p.num_heads} * units;
  const std::int64_t all = p.num_slots * per_slot;
  for (std::int32_t n = static_cast<std::int32_t>(blockIdx.y); n < p.num_seqs;
       n += static_cast<std::int32_t>(gridDim.y)) {
    const std::int32_t b = p.first_seq + n;
    const std::int32_t row = p.batch.rows != nullptr ? p.batch.rows[b] : b;
    std::int64_t len = p.batch.kv_lens[b];
    if (row < 0 || row >= p.num_rows) len = 0;
    if (len > p.max_slots) len = p.max_slots;
    for (std::int64_t w = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; w < all;
         w += std::int64_t{gridDim.x} * blockDim.x) {
      const std::int64_t position = w / per_slot;
      const auto rest = static_cast<std::int32_t>(w - position * per_slot);
      const std::int32_t head = rest / units;
      const std::int32_t d = rest % units * width;
      const std::int64_t to = n * p.to_seq_stride + position * p.to_slot_stride +
                              head * p.to_head_stride + d * p.to_dim_stride;
      std::int64_t from = -1;
      if (position < len && d < p.dim) {
        const std::int32_t page =
            page_of(p.batch, b, static_cast<std::int32_t>(position / p.page_size));
        if (page >= 0 && page < p.num_pages) {
          from = page * p.from.page_stride + position % p.page_size * p.from.slot_stride +
                 (p.first_head + head) * p.from.head_stride + d * p.from.dim_stride;
        }
      }
      if constexpr (kUnit == Unit::Vector) {
        uint4 bits{};
        if (from >= 0) {
          bits =
              *reinterpret_cast<const uint4*>(static_cast<const char*>(p.from.data) + from * size);
        }
        *reinterpret_cast<uint4*>(static_cast<char*>(p.to) + to * size) = bits;
      } else {
        store_element(p.to, p.to_dtype, to,
                      from >= 0 ? load_element(p.from.data, p.from_dtype, from) : 0.0F);
      }
    }
  }
}

int launch_gather(const GatherParams& p, CUstream_st* stream) {
  if (p.num_seqs == 0 || p.num_slots == 0) return 0;
  const std::int64_t size = dtype_bytes(p.to_dtype);
  const std::int64_t width = kVectorBytes / size;
  const bool wide =
      p.from_dtype == p.to_dtype && p.from.dim_stride == 1 && p.to_dim_stride == 1 &&
      p.dim % width == 0 && p.padded_dim % width == 0 &&
      is_aligned(p.from.data, size, p.from.page_stride, p.from.slot_stride, p.from.head_stride) &&
      is_aligned(p.to, size, p.to_seq_stride, p.to_slot_stride, p.to_head_stride);
  const std::int64_t work =
      p.num_slots * p.num_heads * (wide ? p.padded_dim / width : p.padded_dim);
  const unsigned rows = p.num_seqs < 65535 ? static_cast<unsigned>(p.num_seqs) : 65535U;
  const dim3 grid(grid_for(work, kGatherThreads), rows);
  if (wide) {
    gather_pages_kernel<Unit::Vector><<<grid, kGatherThreads, 0, stream>>>(p);
  } else {
    gather_pages_kernel<Unit::Element><<<grid, kGatherThreads, 0, stream>>>(p);
  }
  return launched();
}

}  // namespace
}  // namespace octavo::kernels::cuda
