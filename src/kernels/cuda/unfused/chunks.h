// SPDX-License-Identifier: Apache-2.0
// How unfused cuts a step into batched products that fit its workspace: host arithmetic over
// lengths, the same for the same plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "kernels/params.h"

namespace octavo::kernels::cuda {

/// Key counts are multiples of it: aligned rows, and products of few different shapes as sequences
/// grow.
inline constexpr std::int64_t kKeyStep = 64;

/// What the cut depends on beside the lengths.
struct UnfusedShape {
  std::int32_t group = 1;  ///< Query heads for each KV head.
  std::int32_t num_kv_heads = 1;
  std::int32_t padded_dim = 0;    ///< Of q and K, a multiple of 8.
  std::int32_t padded_dim_v = 0;  ///< Of V, likewise.
  std::int64_t element_bytes = 4;
  bool causal = true;
  std::int64_t window_right = -1;
};

/// One batched product: tokens [first_token, + num_tokens) of each of some batch rows, over some KV
/// heads. Rows with fewer tokens or keys are padded.
struct UnfusedChunk {
  std::int32_t first_seq = 0;
  std::int32_t num_seqs = 0;
  std::int32_t first_head = 0;
  std::int32_t num_heads = 0;
  std::int32_t first_token = 0;
  std::int32_t num_tokens = 0;
  std::int64_t num_keys = 0;   ///< Gathered for each batch row; a multiple of kKeyStep.
  std::int64_t seen_keys = 0;  ///< The first so many are seen by any token; likewise.
  bool gathers = true;         ///< False: K and V are there from the chunk before.
};

/// Where a chunk's arrays lie in the workspace, in bytes.
struct UnfusedLayout {
  UnfusedLayout(const UnfusedShape& shape, const UnfusedChunk& chunk);
  std::size_t k = 0;        ///< [seqs, heads, num_keys, padded_dim]
  std::size_t v = 0;        ///< [seqs, heads, num_keys, padded_dim_v]
  std::size_t q = 0;        ///< [seqs, heads, tokens * group, padded_dim]
  std::size_t scores = 0;   ///< F32 [seqs, heads, tokens * group, seen_keys], then the weights
  std::size_t out = 0;      ///< F32 [seqs, heads, tokens * group, padded_dim_v]
  std::size_t factors = 0;  ///< F32 [seqs, heads, tokens * group]
  std::size_t end = 0;
};

/// Bytes under which a step with a sequence of `kv_len` tokens cannot be cut.
std::size_t least_chunk_bytes(const UnfusedShape& shape, std::int64_t kv_len);

/// Calls `use` for each chunk in order; no chunk takes more than `budget` bytes, which is at least
/// least_chunk_bytes of the longest sequence. Where only maxima are known, every sequence is taken
/// to be as long as they allow.
void for_each_chunk(const UnfusedShape& shape, const StepLengths& lengths, std::size_t budget,
                    const std::function<void(const UnfusedChunk&)>& use);

/// Bytes of the largest chunk when nothing limits it.
std::size_t whole_chunk_bytes(const UnfusedShape& shape, const StepLengths& lengths);

}  // namespace octavo::kernels::cuda
