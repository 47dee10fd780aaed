// SPDX-License-Identifier: Apache-2.0
// The kernels between unfused's products. All are bound by memory; the softmax reads the scores
// once (rows of up to 16 384 keys stay in registers, longer ones are read twice) and writes the
// weights once.
#include "kernels/cuda/unfused/rows.h"

#include <cmath>

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/pad.cuh"
#include "kernels/cuda/common/rope.cuh"
#include "kernels/cuda/common/step.cuh"

namespace octavo::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = static_cast<int>(kWarp);
constexpr int kPerLoad = 4;  // scores of one 16-byte load
constexpr int kLoads = 4;    // that a thread keeps in registers
constexpr int kMostThreads = 1024;

/// A row of the chunk: token `first_token + t` of batch row `first_seq + n`, query head `head`.
struct Row {
  std::int32_t b;
  std::int32_t i;
  std::int32_t head;
  bool is_token;  // the batch row has such a token
};
__device__ Row row_at(const UnfusedRows& p, std::int64_t row) {
  const std::int64_t per_product = std::int64_t{p.chunk.num_tokens} * p.group;
  const std::int64_t product = row / per_product;
  const auto in_product = static_cast<std::uint32_t>(row - product * per_product);
  const std::uint32_t t = in_product / static_cast<std::uint32_t>(p.group);
  const std::uint32_t g = in_product % static_cast<std::uint32_t>(p.group);
  Row result;
  result.b = p.chunk.first_seq + static_cast<std::int32_t>(product / p.chunk.num_heads);
  result.i = p.chunk.first_token + static_cast<std::int32_t>(t);
  const std::int64_t kv_head = p.chunk.first_head + product % p.chunk.num_heads;
  result.head = static_cast<std::int32_t>(kv_head * p.group + g);
  result.is_token = result.i < new_tokens(p.attend.batch, result.b);
  return result;
}
__device__ std::int64_t position_of(const StepBatch& batch, const Row& row) {
  return std::int64_t{batch.kv_lens[row.b]} - new_tokens(batch, row.b) + row.i;
}
std::int64_t num_rows(const UnfusedRows& p) {
  return std::int64_t{p.chunk.num_seqs} * p.chunk.num_heads * p.chunk.num_tokens * p.group;
}

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

/// What a row sees, and what is done to its scores, which the product has scaled.
struct Logits {
  std::int32_t begin;  // keys
  std::int32_t end;
  std::int32_t position;
  float softcap;
  float slope;  // 0: none

  /// Scores of keys `key` … as logits; -inf where a key is not seen.
  __device__ void apply(std::int32_t key, float* values) const {
    if (softcap > 0.0F) {
#pragma unroll
      for (int e = 0; e < kPerLoad; ++e) values[e] = softcap * tanhf(values[e] / softcap);
    }
    if (slope != 0.0F) {
#pragma unroll
      for (int e = 0; e < kPerLoad; ++e) {
        values[e] -= slope * static_cast<float>(abs(position - key - e));
      }
    }
    if (key >= begin && key + kPerLoad <= end) return;
#pragma unroll
    for (int e = 0; e < kPerLoad; ++e) {
      if (key + e < begin || key + e >= end) values[e] = -INFINITY;
    }
  }
};

/// exp(x), x <= 0. Weights that are rounded to 16 bits next have no use for the last bits.
template <typename T>
__device__ float exp_of(float x) {
  if constexpr (sizeof(T) == 4) return expf(x);
  return __expf(x);
}

template <typename Combine>
__device__ float reduce_warp(float value, Combine combine) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

/// Over a block of at most 32 warps; every thread gets the result.
template <typename Combine>
__device__ float reduce_block(float value, float* smem, Combine combine) {
  value = reduce_warp(value, combine);
  const unsigned warps = blockDim.x / kWarp;
  if (warps == 1) return value;
  if (threadIdx.x % kWarp == 0) smem[threadIdx.x / kWarp] = value;
  __syncthreads();
  const unsigned lane = threadIdx.x % kWarp;
  value = combine.kept(smem[lane < warps ? lane : 0], lane < warps);
  value = reduce_warp(value, combine);
  __syncthreads();
  return value;
}

struct Larger {
  __device__ float operator()(float x, float y) const { return fmaxf(x, y); }
  static __device__ float kept(float x, bool own) { return own ? x : -INFINITY; }
};
struct Plus {
  __device__ float operator()(float x, float y) const { return x + y; }
  static __device__ float kept(float x, bool own) { return own ? x : 0.0F; }
};

template <typename T>
__device__ void store_weights(T* to, const float* values) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(to) = {values[0], values[1], values[2], values[3]};
  } else {
    union {
      uint2 bits;
      T elements[kPerLoad];
    } packed = {};
    for (int e = 0; e < kPerLoad; ++e) packed.elements[e] = from_float<T>(values[e]);
    *reinterpret_cast<uint2*>(to) = packed.bits;
  }
}

__device__ void finish_row(const UnfusedRows& p, std::int64_t row, const Row& at, float max,
                           float sum) {
  const AttendParams& a = p.attend;
  const bool empty = sum == 0.0F;
  float factor = empty ? 0.0F : 1.0F / sum;
  if (!empty && a.sinks != nullptr) {
    const float sink = a.sinks[at.head];
    // Relative to the larger of the two, so that neither exponential overflows.
    if (sink > max) {
      const float shrink = expf(max - sink);
      factor = shrink / (sum * shrink + 1.0F);
    } else {
      factor = 1.0F / (sum + expf(sink - max));
    }
  }
  p.factors[row] = factor;
  if (a.lse == nullptr || !at.is_token) return;
  const std::int64_t token = std::int64_t{a.batch.token_offsets[at.b]} + at.i;
  a.lse[token * a.lse_token_stride + at.head * a.lse_head_stride] =
      empty ? -INFINITY : max + logf(sum);
}

enum class Keep { Registers, Memory };

/// A row a block.
template <typename T, Keep kKeep>
__global__ void __launch_bounds__(kMostThreads)
    softmax_rows_kernel(const __grid_constant__ UnfusedRows p, std::int64_t num_rows) {
  __shared__ float smem[kMostThreads / kLanes];
  const AttendParams& a = p.attend;
  const auto seen = static_cast<std::int32_t>(p.chunk.seen_keys);
  const auto stride = static_cast<std::int32_t>(blockDim.x) * kPerLoad;
  const auto first = static_cast<std::int32_t>(threadIdx.x) * kPerLoad;
  for (std::int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const Row at = row_at(p, row);
    const float* scores = p.scores + row * seen;
    T* weights = static_cast<T*>(p.weights) + row * seen;
    const std::int64_t position = position_of(a.batch, at);
    Logits logits{0, 0, static_cast<std::int32_t>(position), a.softcap, 0.0F};
    if (at.is_token) {
      const KeyRange keys =
          visible_keys(a.causal, a.window_left, a.window_right, position, a.batch.kv_lens[at.b]);
      logits.begin = static_cast<std::int32_t>(keys.begin);
      logits.end = static_cast<std::int32_t>(keys.end);
    }
    if (a.alibi_slopes != nullptr) logits.slope = a.alibi_slopes[at.head];

    const auto load = [&](std::int32_t key, float* values) {
      float4 read = {};
      if (key + kPerLoad > logits.begin && key < logits.end) {
        const auto* from = reinterpret_cast<const float4*>(scores + key);
        read = p.scores_in_l2 ? __ldcs(from) : *from;
      }
      values[0] = read.x;
      values[1] = read.y;
      values[2] = read.z;
      values[3] = read.w;
    };
    float kept[kLoads][kPerLoad];
    float max = -INFINITY;
    if constexpr (kKeep == Keep::Registers) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) load(first + j * stride, kept[j]);
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        logits.apply(first + j * stride, kept[j]);
        for (int e = 0; e < kPerLoad; ++e) max = fmaxf(max, kept[j][e]);
      }
    } else {
      for (std::int32_t key = first; key < seen; key += stride) {
        load(key, kept[0]);
        logits.apply(key, kept[0]);
        for (int e = 0; e < kPerLoad; ++e) max = fmaxf(max, kept[0][e]);
      }
    }
    max = reduce_block(max, smem, Larger{});
    const float least = max == -INFINITY ? 0.0F : max;  // a row that sees nothing: all weights 0
    float sum = 0.0F;
    const auto weigh = [&](std::int32_t key, const float* values) {
      float result[kPerLoad];
#pragma unroll
      for (int e = 0; e < kPerLoad; ++e) {
        result[e] = exp_of<T>(values[e] - least);
        sum += result[e];
      }
      store_weights(weights + key, result);
    };
    if constexpr (kKeep == Keep::Registers) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if (first + j * stride < seen) weigh(first + j * stride, kept[j]);
      }
    } else {
      for (std::int32_t key = first; key < seen; key += stride) {
        load(key, kept[0]);
        logits.apply(key, kept[0]);
        weigh(key, kept[0]);
      }
    }
    sum = reduce_block(sum, smem, Plus{});
    if (threadIdx.x == 0) finish_row(p, row, at, max, sum);
  }
}

/// A warp a row.
__global__ void __launch_bounds__(kThreads)
    write_rows_kernel(const __grid_constant__ UnfusedRows p, std::int64_t num_rows) {
  const AttendParams& a = p.attend;
  const std::int64_t step = std::int64_t{gridDim.x} * (kThreads / kLanes);
  for (std::int64_t row = std::int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kWarp;
       row < num_rows; row += step) {
    const Row at = row_at(p, row);
    if (!at.is_token) continue;
    const float factor = p.factors[row];
    const std::int64_t to =
        token_offset(a.out_layout, a.batch, at.b, at.i) + at.head * a.out_layout.head_stride;
    for (std::int32_t d = static_cast<std::int32_t>(threadIdx.x % kWarp); d < a.head_dim_v;
         d += kLanes) {
      store_element(a.out, a.out_dtype, to + d * a.out_layout.dim_stride,
                    p.out[row * p.padded_dim_v + d] * factor);
    }
  }
}

template <typename T>
void launch_softmax(const UnfusedRows& rows, CUstream_st* stream) {
  const std::int64_t wanted = (rows.chunk.seen_keys + kLoads * kPerLoad - 1) / (kLoads * kPerLoad);
  const std::int64_t whole = (wanted + kLanes - 1) / kLanes * kLanes;
  const std::int64_t count = num_rows(rows);
  if (whole <= kMostThreads) {
    softmax_rows_kernel<T, Keep::Registers>
        <<<grid_for(count, 1), static_cast<unsigned>(whole), 0, stream>>>(rows, count);
  } else {
    softmax_rows_kernel<T, Keep::Memory>
        <<<grid_for(count, 1), kMostThreads, 0, stream>>>(rows, count);
  }
}

}  // namespace

int gather_queries(const UnfusedRows& rows, CUstream_st* stream) {
  const RopeParams& rope = rows.attend.rope;
  Frequencies frequencies{};
  if (rope.rotary_dim > 0) fill_frequencies(rope, frequencies.values);
  const std::int64_t tokens = std::int64_t{rows.chunk.num_seqs} * rows.chunk.num_tokens;
  gather_queries_kernel<<<static_cast<unsigned>(tokens), kThreads,
                          static_cast<std::size_t>(rope.rotary_dim / 2) * sizeof(Turn), stream>>>(
      rows, frequencies);
  return launched();
}

int softmax_rows(const UnfusedRows& rows, CUstream_st* stream) {
  if (rows.dtype == DType::F32) {
    launch_softmax<float>(rows, stream);
  } else if (rows.dtype == DType::F16) {
    launch_softmax<__half>(rows, stream);
  } else {
    launch_softmax<__nv_bfloat16>(rows, stream);
  }
  return launched();
}

int write_rows(const UnfusedRows& rows, CUstream_st* stream) {
  const std::int64_t count = num_rows(rows);
  write_rows_kernel<<<grid_for(count, kThreads / kLanes), kThreads, 0, stream>>>(rows, count);
  return launched();
}

int pad_outputs(const AttendParams& params, CUstream_st* stream) {
  return launch_pad(params, stream);
}

}  // namespace octavo::kernels::cuda
