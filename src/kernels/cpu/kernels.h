// SPDX-License-Identifier: Apache-2.0
// What the CPU room offers to dispatch: the append, the definition in plain loops (`unfused`), the
// tiled attention (`cpu`) and the merging of partials. Nothing here checks its arguments, allocates
// or throws; callers have validated and bring the workspace.
#pragma once

#include <octavo/types.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/config.h"
#include "kernels/params.h"

namespace octavo::kernels::cpu {

/// Writes the step's new K and V into their slots in the cache's dtype, K rotated when
/// rope.rotary_dim > 0, then clears batch.clear_lens[b] slots behind each sequence's new end.
/// `turns`: the step's, by compute_turns, or null: K's angles are computed or looked up here.
void append(const AppendParams& params, const float* turns = nullptr);

/// Cosines, then sines of what the step's tokens turn by, [num_tokens, rotary_dim], where neither
/// tables nor positions are the caller's: layers share them.
void compute_turns(const StepBatch& batch, const RopeParams& rope, int num_threads, float* turns);

/// Tokens from format to format, and pages to rows.
void convert_tokens(const ConvertParams& params);
void gather_pages(const GatherParams& params);

/// Attention by its definition, in plain loops. Any strides, any mix of dtypes.
void unfused_attend(const AttendParams& params, void* workspace);

/// Bytes that unfused_attend needs with `num_threads` threads (as resolve_threads gives them).
std::size_t unfused_workspace_bytes(const AttendParams& params, int num_threads);

/// Tiled attention over the pages in place. Wants dim_stride 1 of K and V and a schedule made of
/// kKeyTile and q_tile_tokens. The same bits for any page size, cache kind and number of threads.
/// `turns` as in append.
void attend(const AttendParams& params, const SplitSchedule& schedule, void* workspace,
            const float* turns = nullptr);

/// Bytes that attend needs with `num_threads` threads (as resolve_threads gives them) and `turns`.
std::size_t attend_workspace_bytes(const AttendParams& params, const SplitSchedule& schedule,
                                   int num_threads, const float* turns = nullptr);

/// One tensor [num_tokens, num_heads, dim] by strides.
struct MergeTensor {
  const void* data = nullptr;
  DType dtype = DType::F32;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t dim_stride = 1;
};

/// A partial: its output and its LSE, F32 [num_tokens, num_heads].
struct MergePartial {
  MergeTensor out;
  const float* lse = nullptr;
  std::int64_t lse_token_stride = 0;
  std::int64_t lse_head_stride = 1;
};

struct MergeParams {
  const MergePartial* partials = nullptr;  ///< [num_partials], merged in this order.
  std::int32_t num_partials = 0;
  MergeTensor out;  ///< `data` is written.
  float* lse = nullptr;
  std::int64_t lse_token_stride = 0;
  std::int64_t lse_head_stride = 1;
  const float* sinks = nullptr;  ///< [num_heads] or null
  std::int64_t num_tokens = 0;
  std::int32_t num_heads = 0;
  std::int32_t head_dim_v = 0;
  std::int32_t num_threads = 0;
};

/// out = sum of exp(lse_i - lse) * out_i; partials with LSE -inf are not read.
void merge_partials(const MergeParams& params);

/// `num_threads`, or OpenMP's default where it is 0.
int resolve_threads(int num_threads);

/// The instruction set that `attend` uses on this machine, e.g. "AVX3".
const char* target_name();

}  // namespace octavo::kernels::cpu
