// SPDX-License-Identifier: Apache-2.0
// The small kernels round a cuDNN graph: they turn a step's arrays into the ones that cuDNN wants, and
// cuDNN's results into what DESIGN promises. Compiles without CUDA; the kernels are in step_arrays.cu.
#pragma once

#include <cstdint>

#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::fused {

/// What prepare_step writes. Batch rows from the step's on have length 0.
struct StepArrays {
  std::int32_t num_seqs = 0;  ///< Rows of every array.
  std::int32_t* q_lens = nullptr;
  std::int32_t* kv_lens = nullptr;
  std::int64_t* q_offsets = nullptr;      ///< [num_seqs + 1], elements; null where q has a batch axis
  std::int64_t* out_offsets = nullptr;    ///< The same of the output.
  std::int64_t* stats_offsets = nullptr;  ///< The same of the LSE's [tokens, num_q_heads]; or null
  std::int32_t* k_table = nullptr;        ///< [num_seqs, table_width]; null where K is contiguous
  std::int32_t* v_table = nullptr;        ///< Null where V's pages have K's numbers.
  std::int32_t table_width = 0;
};

/// How the cache's pages are cut for cuDNN: page i becomes pages i * k_ratio + j of `slots` slots each, j
/// < per_page.
struct PageCut {
  std::int32_t slots = 0;  ///< A power of two; 0 where K and V are contiguous.
  std::int32_t per_page = 0;
  std::int32_t k_ratio = 0;
  std::int32_t v_ratio = 0;
};

/// Fills `arrays`. Entries behind a sequence's last page repeat its first one, whose slots are all
/// finite: no page beyond the pool is needed.
void prepare_step(const StepBatch& batch, const PageCut& cut, const TokenLayout& q,
                  const TokenLayout& out, std::int32_t num_q_heads, const StepArrays& arrays,
                  CUstream_st* stream);

/// Zeroes the slots behind each sequence's end up to the next multiple of `tile` (a divisor of the
/// page size, or any for a single page a row), in K and V.
void clear_tails(const StepBatch& batch, const KvPages& kv, std::int32_t num_kv_heads,
                 std::int32_t head_dim, std::int32_t head_dim_v, std::int32_t tile,
                 CUstream_st* stream);

/// Sets the output's padding rows and rows without keys to 0, and writes params.lse (if not null) from
/// cuDNN's stats, -inf in its padding rows and in rows without keys.
void finish_step(const AttendParams& params, const float* stats, std::int64_t stats_q_len,
                 CUstream_st* stream);

}  // namespace octavo::kernels::fused
