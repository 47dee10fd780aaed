// SPDX-License-Identifier: Apache-2.0
// The kernels between unfused's products. All are bound by memory; the softmax reads the scores
// once (rows of up to 16 384 keys stay in registers, longer ones are read twice) and writes the
// weights once, over the beginning of the row that they come from.
#include "kernels/cuda/unfused/rows.h"

#include <cmath>

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/pad.cuh"
#include "kernels/cuda/unfused/rows.cuh"

namespace octavo::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = static_cast<int>(kWarp);
constexpr int kPerLoad = 4;                    // scores of one 16-byte load
constexpr int kLoads = 8;                      // that a thread keeps in registers
constexpr int kLoadKeys = kPerLoad * kLanes;   // of a warp's load
constexpr int kWarpKeys = kLoads * kLoadKeys;  // that a warp keeps
constexpr int kMostThreads = 512;
constexpr int kMostKeys = kMostThreads * kPerLoad * kLoads;  // that a block keeps
constexpr int kLeastBlocks = 2;  // of so many on a multiprocessor: 64 registers a thread

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

struct Larger {
  __device__ float operator()(float x, float y) const { return fmaxf(x, y); }
};
struct Plus {
  __device__ float operator()(float x, float y) const { return x + y; }
};

/// The largest of some logits, and the sum of exp(logit - max).
struct RowState {
  float max;
  float sum;

  /// What weights by `max` are multiplied with to be by `other`; 0 where nothing is seen.
  __device__ float factor_to(float other) const {
    return max == -INFINITY ? 0.0F : expf(max - other);
  }
};

/// The warps' states put together, over a block of at most 32 warps; every thread gets the result.
__device__ RowState reduce_block(const RowState& of_warp, RowState* smem) {
  const unsigned warps = blockDim.x / kWarp;
  if (warps == 1) return of_warp;
  const unsigned lane = threadIdx.x % kWarp;
  if (lane == 0) smem[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  const RowState other = lane < warps ? smem[lane] : RowState{-INFINITY, 0.0F};
  const float max = reduce_warp(other.max, Larger{});
  return {max, reduce_warp(other.sum * other.factor_to(max), Plus{})};
}

enum class Unit { Vector, Element };

template <typename T>
__device__ void store_values(T* to, const float* values) {
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

/// What a block knows of its row.
struct SoftRow {
  Row at;
  Logits logits;
  float* scores;

  template <typename T>
  __device__ T* weights() const {
    return reinterpret_cast<T*>(scores);
  }
};
__device__ SoftRow soft_row(const UnfusedRows& p, std::int64_t row) {
  const AttendParams& a = p.attend;
  SoftRow result;
  result.at = row_at(p, blockIdx.y, blockIdx.x);
  const std::int64_t position = position_of(a.batch, result.at);
  result.logits = {0, 0, static_cast<std::int32_t>(position), a.softcap, 0.0F};
  if (result.at.is_token) {
    const KeyRange keys = visible_keys(a.causal, a.window_left, a.window_right, position,
                                       a.batch.kv_lens[result.at.b]);
    result.logits.begin = static_cast<std::int32_t>(keys.begin);
    result.logits.end = static_cast<std::int32_t>(keys.end);
  }
  if (a.alibi_slopes != nullptr) result.logits.slope = a.alibi_slopes[result.at.head];
  result.scores = p.scores + row * p.chunk.seen_keys;
  return result;
}

/// Scores of keys `key` …; those that nobody sees are not read.
__device__ void load_scores(const SoftRow& row, std::int32_t key, float* values) {
  float4 read = {};
  if (key + kPerLoad > row.logits.begin && key < row.logits.end) {
    read = *reinterpret_cast<const float4*>(row.scores + key);
  }
  values[0] = read.x;
  values[1] = read.y;
  values[2] = read.z;
  values[3] = read.w;
}

/// Logits of the keys that a thread keeps, `first` the first of them.
__device__ void load_logits(const SoftRow& row, std::int32_t first, float (*kept)[kPerLoad]) {
#pragma unroll
  for (int j = 0; j < kLoads; ++j) load_scores(row, first + j * kLoadKeys, kept[j]);
#pragma unroll
  for (int j = 0; j < kLoads; ++j) row.logits.apply(first + j * kLoadKeys, kept[j]);
}

__device__ float largest_of(const float (*kept)[kPerLoad], float largest) {
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
#pragma unroll
    for (int e = 0; e < kPerLoad; ++e) largest = fmaxf(largest, kept[j][e]);
  }
  return largest;
}

/// Logits become exp(logit - max), of which the sum is given; 0 where nothing is seen.
template <typename T>
__device__ float exponentials(float (*kept)[kPerLoad], float max) {
  const float least = max == -INFINITY ? 0.0F : max;
  float sum = 0.0F;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
#pragma unroll
    for (int e = 0; e < kPerLoad; ++e) {
      kept[j][e] = exp_of<T>(kept[j][e] - least);
      sum += kept[j][e];
    }
  }
  return sum;
}

template <typename T>
__device__ void store_weights(T* weights, std::int32_t first, std::int32_t seen,
                              const float (*kept)[kPerLoad]) {
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    if (first + j * kLoadKeys < seen) store_values(weights + first + j * kLoadKeys, kept[j]);
  }
}

/// The first key that a thread keeps, of a block's.
__device__ std::int32_t first_key() {
  return static_cast<std::int32_t>(threadIdx.x / kWarp * kWarpKeys +
                                   threadIdx.x % kWarp * kPerLoad);
}

/// A row a block, which stays in registers from its one read to its one write: each warp takes
/// exponentials by its own maximum, and the block meets once. Nobody writes before that: the
/// weights lie where scores of other warps were.
template <typename T>
__global__ void __launch_bounds__(kMostThreads, kLeastBlocks)
    softmax_rows_kernel(const __grid_constant__ UnfusedRows p) {
  __shared__ RowState smem[kMostThreads / kLanes];
  const std::int64_t row_idx = std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const SoftRow row = soft_row(p, row_idx);
  const std::int32_t first = first_key();
  float kept[kLoads][kPerLoad];
  load_logits(row, first, kept);
  RowState own{};
  own.max = reduce_warp(largest_of(kept, -INFINITY), Larger{});
  own.sum = reduce_warp(exponentials<T>(kept, own.max), Plus{});
  const RowState whole = reduce_block(own, smem);
  const float factor = own.factor_to(whole.max);
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
#pragma unroll
    for (int e = 0; e < kPerLoad; ++e) kept[j][e] *= factor;
  }
  const auto seen = static_cast<std::int32_t>(p.chunk.seen_keys);
  store_weights(row.weights<T>(), first, seen, kept);
  if (threadIdx.x == 0) finish_row(p, row_idx, row.at, whole.max, whole.sum);
}

/// The same for rows that registers do not hold: read twice, in parts that they do hold.
template <typename T>
__global__ void __launch_bounds__(kMostThreads, kLeastBlocks)
    softmax_long_rows_kernel(const __grid_constant__ UnfusedRows p) {
  __shared__ RowState smem[kMostThreads / kLanes];
  const std::int64_t row_idx = std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const SoftRow row = soft_row(p, row_idx);
  const auto seen = static_cast<std::int32_t>(p.chunk.seen_keys);
  float kept[kLoads][kPerLoad];
  RowState own{-INFINITY, 0.0F};
  for (std::int32_t part = 0; part < seen; part += kMostKeys) {
    load_logits(row, part + first_key(), kept);
    const RowState before = own;
    own.max = largest_of(kept, own.max);
    own.sum = own.sum * before.factor_to(own.max) + exponentials<T>(kept, own.max);
  }
  RowState of_warp{reduce_warp(own.max, Larger{}), 0.0F};
  of_warp.sum = reduce_warp(own.sum * own.factor_to(of_warp.max), Plus{});
  const RowState whole = reduce_block(of_warp, smem);
  for (std::int32_t part = 0; part < seen; part += kMostKeys) {
    load_logits(row, part + first_key(), kept);
    static_cast<void>(exponentials<T>(kept, whole.max));
    __syncthreads();  // weights of a part lie where scores of it, or of parts before, were
    store_weights(row.weights<T>(), part + first_key(), seen, kept);
  }
  if (threadIdx.x == 0) finish_row(p, row_idx, row.at, whole.max, whole.sum);
}

/// A warp a row; in vectors of 4 where layouts allow.
template <typename T, Unit kUnit>
__global__ void __launch_bounds__(kThreads)
    write_rows_kernel(const __grid_constant__ UnfusedRows p, std::int32_t rows_of_product) {
  const AttendParams& a = p.attend;
  const auto in_product =
      static_cast<std::int32_t>(blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp);
  if (in_product >= rows_of_product) return;
  const Row at = row_at(p, blockIdx.y, static_cast<std::uint32_t>(in_product));
  if (!at.is_token) return;
  const std::int64_t row = std::int64_t{blockIdx.y} * rows_of_product + in_product;
  const float factor = p.factors[row];
  const std::int64_t to =
      token_offset(a.out_layout, a.batch, at.b, at.i) + at.head * a.out_layout.head_stride;
  const float* from = p.out + row * p.padded_dim_v;
  const auto lane = static_cast<std::int32_t>(threadIdx.x % kWarp);
  T* out = static_cast<T*>(a.out) + to;
  if constexpr (kUnit == Unit::Vector) {
    for (std::int32_t d = lane * kPerLoad; d < a.head_dim_v; d += kLanes * kPerLoad) {
      float4 read = *reinterpret_cast<const float4*>(from + d);
      const float values[kPerLoad] = {read.x * factor, read.y * factor, read.z * factor,
                                      read.w * factor};
      store_values(out + d, values);
    }
  } else {
    for (std::int32_t d = lane; d < a.head_dim_v; d += kLanes)
      out[d * a.out_layout.dim_stride] = from_float<T>(from[d] * factor);
  }
}

template <typename T>
void launch_write(const UnfusedRows& rows, CUstream_st* stream) {
  const AttendParams& a = rows.attend;
  const TokenLayout& out = a.out_layout;
  const dim3 grid = grid_of(rows, kThreads / kLanes);
  const auto count = static_cast<std::int32_t>(rows_of_product(rows));
  if (a.head_dim_v % kPerLoad == 0 && out.dim_stride == 1 &&
      is_aligned(a.out, sizeof(T), out.batch_stride, out.token_stride, out.head_stride)) {
    write_rows_kernel<T, Unit::Vector><<<grid, kThreads, 0, stream>>>(rows, count);
  } else {
    write_rows_kernel<T, Unit::Element><<<grid, kThreads, 0, stream>>>(rows, count);
  }
}

template <typename T>
void launch_softmax(const UnfusedRows& rows, CUstream_st* stream) {
  const auto threads =
      static_cast<unsigned>((rows.chunk.seen_keys + kWarpKeys - 1) / kWarpKeys * kLanes);
  const dim3 grid = grid_of(rows, 1);
  if (threads > kMostThreads) {
    softmax_long_rows_kernel<T><<<grid, kMostThreads, 0, stream>>>(rows);
  } else {
    softmax_rows_kernel<T><<<grid, threads, 0, stream>>>(rows);
  }
}

}  // namespace

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
  if (rows.attend.out_dtype == DType::F32) {
    launch_write<float>(rows, stream);
  } else if (rows.attend.out_dtype == DType::F16) {
    launch_write<__half>(rows, stream);
  } else {
    launch_write<__nv_bfloat16>(rows, stream);
  }
  return launched();
}

int pad_outputs(const AttendParams& params, CUstream_st* stream) {
  return launch_pad(params, stream);
}

}  // namespace octavo::kernels::cuda
