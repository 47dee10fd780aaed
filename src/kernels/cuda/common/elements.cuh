// SPDX-License-Identifier: Apache-2.0
// Elements of F32, F16 and BF16: one at a time by a dtype known at run time, and types for those
// known when compiled. Rounding is to nearest, ties to even, as on the CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <octavo/types.h>

#include <cstdint>

namespace octavo::kernels::cuda {

/// What a thread moves at once where everything is aligned.
inline constexpr int kVectorBytes = 16;

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

__device__ inline float load_element(const void* data, DType dtype, std::int64_t offset) {
  if (dtype == DType::F32) return static_cast<const float*>(data)[offset];
  if (dtype == DType::F16) return to_float(static_cast<const __half*>(data)[offset]);
  return to_float(static_cast<const __nv_bfloat16*>(data)[offset]);
}

__device__ inline void store_element(void* data, DType dtype, std::int64_t offset, float value) {
  if (dtype == DType::F32) {
    static_cast<float*>(data)[offset] = value;
  } else if (dtype == DType::F16) {
    static_cast<__half*>(data)[offset] = from_float<__half>(value);
  } else {
    static_cast<__nv_bfloat16*>(data)[offset] = from_float<__nv_bfloat16>(value);
  }
}

/// Sixteen bytes as elements.
template <typename T>
union Vector {
  static constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(T));
  uint4 bits;
  T elements[kSize];
  __device__ Vector() : bits{} {}
};

}  // namespace octavo::kernels::cuda
