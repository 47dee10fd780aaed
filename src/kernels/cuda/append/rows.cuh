// SPDX-License-Identifier: Apache-2.0
// What a thread of append does with the rows of one side of a token: waits, loads, stores, clears.
#pragma once

#include <cstdint>

#include "kernels/cuda/append/tokens.cuh"
#include "kernels/cuda/common/elements.cuh"

namespace octavo::kernels::cuda {

/// Waits for what is ahead on the stream, all of it done and seen, then lets a kernel behind that
/// waits likewise be launched. Without effect where kernels are launched one after the other.
__device__ inline void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Rows threadIdx.y, threadIdx.y + blockDim.y … of one side of a token, kRows of them in flight.
/// The first of them are asked for before the token's slot is looked at.
template <int kRows>
struct RowsInFlight {
  uint4 bits[kRows];

  /// `left` rows of the side are there from this thread's on; `from` moves on.
  __device__ void load(const std::byte*& from, std::int64_t step, int left) {
#pragma unroll
    for (int r = 0; r < kRows; ++r, from += step) {
      if (r * static_cast<int>(blockDim.y) < left) bits[r] = load_vector(from);
    }
  }
};

/// Slots behind a token, this thread's rows and column of them.
__device__ inline void clear_behind(const AppendSide& side, std::byte* to, std::int32_t num_clear) {
#pragma unroll 1
  for (std::int32_t s = 1; s <= num_clear; ++s) {
    to += side.to_slot_stride;
#pragma unroll 1
    for (auto row = static_cast<int>(threadIdx.y); row < side.num_rows;
         row += static_cast<int>(blockDim.y)) {
      store_vector(to + row * side.to_row_stride, uint4{});
    }
  }
}

/// Copies this thread's rows of one side of a token.
template <int kRows>
__device__ void copy_rows(const VectorAppend& p, const AppendSide& side, std::int64_t token) {
  const std::int64_t column = std::int64_t{threadIdx.x} * kVectorBytes;
  const auto first = static_cast<int>(threadIdx.y);
  const auto apart = static_cast<int>(blockDim.y);
  const std::int64_t from_step = apart * side.from_row_stride;
  const std::int64_t to_step = apart * side.to_row_stride;
  const std::byte* from = rows_from(p, side, token) + column + first * side.from_row_stride;
  int left = side.num_rows - first;
  const TokenSlot slot = load_slot(p.slots + token);
  const std::int32_t num_tokens = *p.num_tokens;
  RowsInFlight<kRows> rows;
  rows.load(from, from_step, left);
  if (token >= num_tokens || slot.page < 0) return;
  std::byte* const behind = rows_to(side, slot) + column;
  std::byte* to = behind + first * side.to_row_stride;
  while (true) {
#pragma unroll
    for (int r = 0; r < kRows; ++r, to += to_step) {
      if (r * apart < left) store_vector(to, rows.bits[r]);
    }
    left -= kRows * apart;
    if (left <= 0) break;
    rows.load(from, from_step, left);
  }
  if (slot.num_clear > 0) clear_behind(side, behind, slot.num_clear);
}

}  // namespace octavo::kernels::cuda
