// SPDX-License-Identifier: Apache-2.0
// How grids are sized and launches answered.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::kernels::cuda {

inline constexpr std::int64_t kMaxGrid = 0x7FFFFFFF;

/// Blocks for `work` items of which a block does `per_block`; kernels loop over what is beyond.
inline unsigned grid_for(std::int64_t work, std::int64_t per_block) {
  const std::int64_t blocks = (work + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > kMaxGrid ? kMaxGrid : blocks);
}

/// What a launch that just happened reported.
inline int launched() { return static_cast<int>(cudaGetLastError()); }

/// Whether address and strides (in elements of `size` bytes) all allow accesses of 16 bytes.
template <typename... Strides>
bool is_aligned(const void* data, std::int64_t size, Strides... strides) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && (... && (strides * size % 16 == 0));
}

}  // namespace octavo::kernels::cuda
