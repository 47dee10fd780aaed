// SPDX-License-Identifier: Apache-2.0
// Where tokens of a step are: which batch row has a packed token, where its row in a tensor is, and
// which slot of the cache it has. All offsets are 64-bit.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace octavo::kernels::cuda {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;

__device__ inline std::int32_t new_tokens(const StepBatch& batch, std::int32_t b) {
  return batch.token_offsets[b + 1] - batch.token_offsets[b];
}

/// Element offset of token `i` of batch row `b`, head 0.
__device__ inline std::int64_t token_offset(const TokenLayout& layout, const StepBatch& batch,
                                            std::int32_t b, std::int32_t i) {
  if (layout.ragged) return (std::int64_t{batch.token_offsets[b]} + i) * layout.token_stride;
  return b * layout.batch_stride + i * layout.token_stride;
}

/// A new token's place in the step.
struct TokenPlace {
  std::int32_t b = -1;  ///< -1: no token of the step.
  std::int32_t i = 0;
  std::int32_t kv_len = 0;
  std::int32_t num_new = 0;
  std::int32_t row = 0;  ///< Of the page table.
};

/// The batch row of packed token `token`, found by a whole warp (every lane gets the answer). A
/// decode step, where token and batch row are the same, is answered by its first loads.
__device__ inline TokenPlace place_of_token(const StepBatch& batch, std::int64_t token) {
  const auto lane = static_cast<int>((threadIdx.y * blockDim.x + threadIdx.x) % kWarp);
  const std::int32_t n = batch.num_seqs;
  TokenPlace place;
  if (n == 0) return place;
  const auto guess = static_cast<std::int32_t>(token < n ? token : n - 1);
  const std::int32_t total = batch.token_offsets[n];
  const std::int32_t guess_begin = batch.token_offsets[guess];
  const std::int32_t guess_end = batch.token_offsets[guess + 1];
  const auto len_of = [&](std::int32_t b) {
    return batch.kv_lens != nullptr ? batch.kv_lens[b] : 0;
  };
  const auto row_of = [&](std::int32_t b) { return batch.rows != nullptr ? batch.rows[b] : b; };
  const std::int32_t guess_len = len_of(guess);
  const std::int32_t guess_row = row_of(guess);
  if (token >= total) return place;
  if (guess_begin <= token && token < guess_end) {
    return {guess, static_cast<std::int32_t>(token - guess_begin), guess_len,
            guess_end - guess_begin, guess_row};
  }
  // The last row that begins at or before the token: 32 candidates at a time.
  std::int32_t low = 0;
  std::int32_t span = n;
  while (span > 1) {
    const std::int32_t step = (span + static_cast<int>(kWarp) - 1) / static_cast<int>(kWarp);
    const std::int32_t at = lane * step;
    const bool begun = at < span && batch.token_offsets[low + at] <= token;
    const std::int32_t last = __popc(__ballot_sync(kAllLanes, begun)) - 1;
    low += last * step;
    span = min(step, span - last * step);
  }
  const std::int32_t begin = batch.token_offsets[low];
  return {low, static_cast<std::int32_t>(token - begin), len_of(low),
          batch.token_offsets[low + 1] - begin, row_of(low)};
}

}  // namespace octavo::kernels::cuda
