// SPDX-License-Identifier: Apache-2.0
// Element by element, or a block a row: none of these is where the time goes.
#include "examples/generate/cuda/kernels.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace generate::gpu {
namespace {

constexpr int kThreads = 256;

__device__ void store(float* to, float value) { *to = value; }
__device__ void store(__nv_bfloat16* to, float value) { *to = __float2bfloat16_rn(value); }
__device__ float load(float value) { return value; }
__device__ float load(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__global__ void take_rows_kernel(const T* matrix, const std::int32_t* rows, std::int64_t count,
                                 std::int64_t width, float* out) {
  for (std::int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const T* row = matrix + rows[i] * width;
    for (std::int64_t d = threadIdx.x; d < width; d += kThreads) out[i * width + d] = load(row[d]);
  }
}

template <typename T>
__global__ void rms_norm_kernel(const float* x, const std::int32_t* rows, std::int64_t count,
                                std::int64_t width, const float* gain, float epsilon, T* out) {
  __shared__ float partial[kThreads];
  for (std::int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const float* row = x + (rows != nullptr ? rows[i] : i) * width;
    float sum = 0.0F;
    for (std::int64_t d = threadIdx.x; d < width; d += kThreads) sum = fmaf(row[d], row[d], sum);
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned half = kThreads / 2; half > 0; half /= 2) {
      if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
      __syncthreads();
    }
    const float scale = 1.0F / sqrtf(partial[0] / static_cast<float>(width) + epsilon);
    for (std::int64_t d = threadIdx.x; d < width; d += kThreads)
      store(out + i * width + d, row[d] * scale * gain[d]);
    __syncthreads();  // partial is the next row's
  }
}

template <typename T>
__global__ void swiglu_kernel(const float* gate_up, std::int64_t count, std::int64_t width,
                              T* out) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count * width;
       i += step) {
    const float* row = gate_up + i / width * 2 * width;
    const float gate = row[i % width];
    store(out + i, gate / (1.0F + expf(-gate)) * row[width + i % width]);
  }
}

template <typename T>
__global__ void round_kernel(const float* x, std::int64_t count, T* out) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step)
    store(out + i, x[i]);
}

unsigned blocks_for(std::int64_t count) {
  constexpr std::int64_t kMost = 65535;
  return static_cast<unsigned>(count < 1 ? 1 : count > kMost ? kMost : count);
}
unsigned blocks_of_threads(std::int64_t count) {
  return blocks_for((count + kThreads - 1) / kThreads);
}

int launched() { return static_cast<int>(cudaGetLastError()); }

}  // namespace

int take_rows(const void* matrix, WeightType type, const std::int32_t* rows, std::int64_t count,
              std::int64_t width, float* out) {
  if (type == WeightType::F32) {
    take_rows_kernel<<<blocks_for(count), kThreads>>>(static_cast<const float*>(matrix), rows,
                                                      count, width, out);
  } else {
    take_rows_kernel<<<blocks_for(count), kThreads>>>(static_cast<const __nv_bfloat16*>(matrix),
                                                      rows, count, width, out);
  }
  return launched();
}

int rms_norm(const float* x, const std::int32_t* rows, std::int64_t count, std::int64_t width,
             const float* gain, float epsilon, void* out, WeightType type) {
  if (type == WeightType::F32) {
    rms_norm_kernel<<<blocks_for(count), kThreads>>>(x, rows, count, width, gain, epsilon,
                                                     static_cast<float*>(out));
  } else {
    rms_norm_kernel<<<blocks_for(count), kThreads>>>(x, rows, count, width, gain, epsilon,
                                                     static_cast<__nv_bfloat16*>(out));
  }
  return launched();
}

int swiglu(const float* gate_up, std::int64_t count, std::int64_t width, void* out,
           WeightType type) {
  if (type == WeightType::F32) {
    swiglu_kernel<<<blocks_of_threads(count * width), kThreads>>>(gate_up, count, width,
                                                                  static_cast<float*>(out));
  } else {
    swiglu_kernel<<<blocks_of_threads(count * width), kThreads>>>(gate_up, count, width,
                                                                  static_cast<__nv_bfloat16*>(out));
  }
  return launched();
}

int round_to(const float* x, std::int64_t count, void* out, WeightType type) {
  if (type == WeightType::F32) {
    round_kernel<<<blocks_of_threads(count), kThreads>>>(x, count, static_cast<float*>(out));
  } else {
    round_kernel<<<blocks_of_threads(count), kThreads>>>(x, count,
                                                         static_cast<__nv_bfloat16*>(out));
  }
  return launched();
}

}  // namespace generate::gpu
