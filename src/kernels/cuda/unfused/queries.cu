// SPDX-License-Identifier: Apache-2.0
// The chunk's tokens of q as the rows of its products: in vectors where q is in the products' dtype
// and isn't rotated, else element by element.
#include <cstdint>

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/rope.cuh"
#include "kernels/cuda/unfused/rows.cuh"
#include "kernels/cuda/unfused/rows.h"

namespace octavo::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = static_cast<int>(kWarp);

struct Frequencies {
  double values[kMaxRotaryPairs];
};

/// A token a block.
__global__ void __launch_bounds__(kThreads)
    gather_queries_kernel(const __grid_constant__ UnfusedRows p,
                          const __grid_constant__ Frequencies frequencies) {
  extern __shared__ Turn turns_smem[];  // [pairs]
  const AttendParams& a = p.attend;
  const auto t = static_cast<std::int32_t>(blockIdx.x % p.chunk.num_tokens);
  const auto n = static_cast<std::int32_t>(blockIdx.x / p.chunk.num_tokens);
  const std::int32_t b = p.chunk.first_seq + n;
  const std::int32_t i = p.chunk.first_token + t;
  const bool is_token = i < new_tokens(a.batch, b);
  if (a.rope.rotary_dim > 0 && is_token) {
    const std::int64_t planned = std::int64_t{a.batch.kv_lens[b]} - new_tokens(a.batch, b) + i;
    const std::int64_t position =
        a.rope.positions != nullptr ? a.rope.positions[a.batch.token_offsets[b] + i] : planned;
    for (int pair = static_cast<int>(threadIdx.x); pair < a.rope.rotary_dim / 2; pair += kThreads) {
      turns_smem[pair] = turn_at(a.rope, frequencies.values, position, pair);
    }
    __syncthreads();
  }
  const std::int64_t from = is_token ? token_offset(a.q_layout, a.batch, b, i) : 0;
  const std::int32_t heads = p.chunk.num_heads * p.group;
  const auto lane = static_cast<std::int32_t>(threadIdx.x % kWarp);
  for (auto h = static_cast<std::int32_t>(threadIdx.x / kWarp); h < heads; h += kThreads / kLanes) {
    const std::int64_t head = from + (p.chunk.first_head * p.group + h) * a.q_layout.head_stride;
    const std::int64_t product = std::int64_t{n} * p.chunk.num_heads + h / p.group;
    const std::int64_t row = (product * p.chunk.num_tokens + t) * p.group + h % p.group;
    for (std::int32_t d = lane; d < p.padded_dim; d += kLanes) {
      float value = 0.0F;
      if (is_token && d < a.head_dim) {
        value = load_element(a.q, a.q_dtype, head + d * a.q_layout.dim_stride);
        if (d < a.rope.rotary_dim) {
          const float other =
              load_element(a.q, a.q_dtype, head + partner_of(a.rope, d) * a.q_layout.dim_stride);
          value = turned(turns_smem[pair_of(a.rope, d)], is_first(a.rope, d), value, other);
        }
      }
      store_element(p.q, p.dtype, row * p.padded_dim + d, value);
    }
  }
}

/// Sixteen bytes a thread, `units` of them a row.
__global__ void __launch_bounds__(kThreads)
    copy_queries_kernel(const __grid_constant__ UnfusedRows p, std::int32_t rows_of_product,
                        std::int32_t units) {
  const std::uint32_t work = blockIdx.x * kThreads + threadIdx.x;
  const std::uint32_t in_product = work / static_cast<std::uint32_t>(units);
  const std::uint32_t unit = work % static_cast<std::uint32_t>(units);
  if (in_product >= static_cast<std::uint32_t>(rows_of_product)) return;
  const AttendParams& a = p.attend;
  const Row at = row_at(p, blockIdx.y, in_product);
  uint4 bits{};
  if (at.is_token) {
    const std::int64_t from =
        token_offset(a.q_layout, a.batch, at.b, at.i) + at.head * a.q_layout.head_stride;
    bits = reinterpret_cast<const uint4*>(static_cast<const char*>(a.q) +
                                          from * dtype_bytes(a.q_dtype))[unit];
  }
  const std::int64_t row = std::int64_t{blockIdx.y} * rows_of_product + in_product;
  static_cast<uint4*>(p.q)[row * units + unit] = bits;
}

/// Whether copy_queries_kernel does for it.
bool copies_queries(const UnfusedRows& rows) {
  const AttendParams& a = rows.attend;
  const TokenLayout& q = a.q_layout;
  return a.rope.rotary_dim == 0 && a.q_dtype == rows.dtype && a.head_dim == rows.padded_dim &&
         q.dim_stride == 1 &&
         is_aligned(a.q, dtype_bytes(a.q_dtype), q.batch_stride, q.token_stride, q.head_stride);
}

}  // namespace

int gather_queries(const UnfusedRows& rows, CUstream_st* stream) {
  if (copies_queries(rows)) {
    const auto units =
        static_cast<std::int32_t>(rows.padded_dim * dtype_bytes(rows.dtype) / kVectorBytes);
    const dim3 grid{grid_for(rows_of_product(rows) * units, kThreads), num_products(rows)};
    copy_queries_kernel<<<grid, kThreads, 0, stream>>>(
        rows, static_cast<std::int32_t>(rows_of_product(rows)), units);
    return launched();
  }
  const RopeParams& rope = rows.attend.rope;
  Frequencies frequencies{};
  if (rope.rotary_dim > 0) fill_frequencies(rope, frequencies.values);
  const std::int64_t tokens = std::int64_t{rows.chunk.num_seqs} * rows.chunk.num_tokens;
  gather_queries_kernel<<<static_cast<unsigned>(tokens), kThreads,
                          static_cast<std::size_t>(rope.rotary_dim / 2) * sizeof(Turn), stream>>>(
      rows, frequencies);
  return launched();
}

}  // namespace octavo::kernels::cuda
