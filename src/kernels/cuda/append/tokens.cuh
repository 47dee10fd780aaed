// SPDX-License-Identifier: Apache-2.0
// What append's kernels are told, and what they have in common: where a new token comes from and
// where it goes.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/rope.cuh"
#include "kernels/params.h"

namespace octavo::kernels::cuda {

inline constexpr int kAppendThreads = 256;

/// K or V as rows of vectors of 16 bytes: heads, or a token's dense heads cut anew. Strides are in
/// bytes.
struct AppendSide {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::int64_t from_batch_stride = 0;
  std::int64_t from_token_stride = 0;
  std::int64_t from_row_stride = 0;
  std::int64_t to_page_stride = 0;
  std::int64_t to_slot_stride = 0;
  std::int64_t to_row_stride = 0;
  std::int32_t num_rows = 0;
  std::int32_t num_columns = 0;
};

struct VectorAppend {
  AppendSide sides[2];  // K, V
  const TokenSlot* slots = nullptr;
  const TokenIndex* indices = nullptr;  // null: tokens are packed
  const std::int32_t* num_tokens = nullptr;
  std::int64_t max_tokens = 0;
};

/// RoPE as the kernel over vectors sees it.
struct VectorRope {
  const float* cos = nullptr;
  const float* sin = nullptr;
  std::int64_t num_table_positions = 0;
  const std::int32_t* positions = nullptr;
  std::int32_t rotary_dim = 0;
};

/// The rows of token `token` in the new tokens.
__device__ inline const std::byte* rows_from(const VectorAppend& p, const AppendSide& side,
                                             std::int64_t token) {
  if (p.indices == nullptr) return side.from + token * side.from_token_stride;
  // What lies behind the step's tokens is of another step, or of nobody: token 0 of row 0 is always
  // there to be read.
  const TokenIndex stored = p.indices[token];
  const TokenIndex at = token < *p.num_tokens ? stored : TokenIndex{};
  return side.from + at.b * side.from_batch_stride + at.i * side.from_token_stride;
}

__device__ inline std::byte* rows_to(const AppendSide& side, const TokenSlot& slot) {
  return side.to + slot.page * side.to_page_stride + slot.slot * side.to_slot_stride;
}

__device__ inline TokenSlot load_slot(const TokenSlot* from) {
  const int4 bits = *reinterpret_cast<const int4*>(from);
  return {bits.x, bits.y, bits.z, bits.w};
}
__device__ inline uint4 load_vector(const std::byte* from) {
  return __ldcs(reinterpret_cast<const uint4*>(from));
}
__device__ inline void store_vector(std::byte* to, uint4 bits) {
  *reinterpret_cast<uint4*>(to) = bits;
}

}  // namespace octavo::kernels::cuda
