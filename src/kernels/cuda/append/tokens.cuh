// SPDX-License-Identifier: Apache-2.0
// What the blocks of both append kernels have in common: looking up the tokens of a block, the
// turns of RoPE, and how K and V lie side by side in a token's work.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/rope.cuh"
#include "kernels/cuda/common/step.cuh"

namespace octavo::kernels::cuda {

inline constexpr int kAppendThreads = 256;
inline constexpr int kMaxTokensPerBlock = 16;

/// A token of a block, in elements.
struct BlockToken {
  std::int64_t k_from, v_from;    // head 0 in the new tokens
  std::int64_t k_to, v_to;        // head 0 of the slot
  std::int64_t k_clear, v_clear;  // head 0 of the first slot to clear
  std::int64_t position;          // for RoPE
  std::int32_t num_clear;         // slots behind the token to clear
  bool valid;
};

/// A thread's part of a token: head 0 … of K, then of V, in units (vectors or elements).
struct HeadPart {
  bool is_key;
  std::int32_t head;
  std::int32_t unit;
};
__device__ inline HeadPart part_of(std::uint32_t r, std::uint32_t k_units,
                                   std::uint32_t k_head_units, std::uint32_t v_head_units) {
  const bool is_key = r < k_units;
  const std::uint32_t in = is_key ? r : r - k_units;
  const std::uint32_t per_head = is_key ? k_head_units : v_head_units;
  return {is_key, static_cast<std::int32_t>(in / per_head),
          static_cast<std::int32_t>(in % per_head)};
}

/// By a whole warp; lane 0 writes the answer.
__device__ inline void look_up_token(const AppendParams& p, std::int64_t token, BlockToken& to) {
  const TokenPlace place = place_of_token(p.batch, token);
  if ((threadIdx.y * blockDim.x + threadIdx.x) % kWarp != 0) return;
  const std::int32_t b = place.b;
  const std::int64_t position = std::int64_t{place.kv_len} - place.num_new + place.i;
  to.valid = false;
  to.num_clear = 0;
  if (b < 0 || position < 0) return;
  const auto page_size = static_cast<std::uint32_t>(p.kv.page_size);
  const auto page_idx = static_cast<std::uint32_t>(position) / page_size;
  std::int64_t page = place.row;
  if (p.batch.page_table != nullptr) {
    page = p.batch.page_table[page * p.batch.page_table_stride + page_idx];
  }
  to.valid = page >= 0 && page < p.kv.num_pages;
  if (!to.valid) return;
  const std::int64_t slot = static_cast<std::uint32_t>(position) - page_idx * page_size;
  to.k_from = token_offset(p.k_layout, p.batch, b, place.i);
  to.v_from = token_offset(p.v_layout, p.batch, b, place.i);
  to.k_to = page * p.kv.k.page_stride + slot * p.kv.k.slot_stride;
  to.v_to = page * p.kv.v.page_stride + slot * p.kv.v.slot_stride;
  to.position = p.rope.positions != nullptr ? p.rope.positions[token] : position;
  // Slots to clear lie in the page of the sequence's last token, which it owns alone.
  if (p.batch.clear_lens != nullptr && place.i == place.num_new - 1) {
    to.num_clear = p.batch.clear_lens[b];
    to.k_clear = to.k_to + p.kv.k.slot_stride;
    to.v_clear = to.v_to + p.kv.v.slot_stride;
  }
}

/// Turns [tokens, pairs] of a block's tokens.
__device__ inline void make_turns(const AppendParams& p, const double* frequencies,
                                  const BlockToken* tokens, int num_tokens, Turn* turns) {
  const int pairs = p.rope.rotary_dim / 2;
  const auto thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  for (int w = thread; w < num_tokens * pairs; w += static_cast<int>(blockDim.x * blockDim.y)) {
    const BlockToken& token = tokens[w / pairs];
    if (token.valid) turns[w] = turn_at(p.rope, frequencies, token.position, w % pairs);
  }
}

}  // namespace octavo::kernels::cuda
