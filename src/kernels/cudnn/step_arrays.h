// SPDX-License-Identifier: Apache-2.0
// The small kernels round a cuDNN graph: they turn a step's arrays into the ones that cuDNN wants,
// and cuDNN's results into what DESIGN promises. Compiles without CUDA; the kernels are in
// step_arrays.cu.
#pragma once

#include <cstdint>

#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::fused {

/// What cuDNN's batch rows are.
enum class BatchRows : std::uint8_t {
  Sequences,  ///< One a sequence.
  Tokens,     ///< One a row of q, with the keys that this token sees: cuDNN's decode path.
  Pages,      ///< One a page of the cache, with the sequence that lies there or none.
};

/// What prepare_step writes. Rows behind the step's have length 0.
struct StepArrays {
  BatchRows kind = BatchRows::Sequences;
  std::int32_t num_rows = 0;  ///< Rows of every array.
  std::int32_t* q_lens = nullptr;
  std::int32_t* kv_lens = nullptr;
  std::int64_t* q_offsets = nullptr;    ///< [num_rows + 1], elements; null where q has a batch axis
  std::int64_t* out_offsets = nullptr;  ///< The same of the output.
  std::int64_t* stats_offsets = nullptr;  ///< The same of the LSE's [tokens, num_q_heads]; or null
  std::int32_t* k_table = nullptr;        ///< [num_rows, table_width]; null where K is contiguous
  std::int32_t* v_table = nullptr;        ///< Null where V's pages have K's numbers.
  std::int32_t table_width = 0;
};

/// How the cache's pages are cut for cuDNN: page i becomes pages i * k_ratio + j of `slots` slots
/// each, j < per_page.
struct PageCut {
  std::int32_t slots = 0;  ///< A power of two; 0 where K and V are contiguous.
  std::int32_t per_page = 0;
  std::int32_t k_ratio = 0;
  std::int32_t v_ratio = 0;
};

/// Fills `arrays`; of `params` it reads batch, layouts, mask and num_q_heads. Entries behind a
/// sequence's last page repeat its first one, whose slots are all finite: no page beyond the pool
/// is needed.
void prepare_step(const AttendParams& params, const PageCut& cut, const StepArrays& arrays,
                  CUstream_st* stream);

/// Zeroes V's slots behind each sequence's end up to the next multiple of `tile` or the page's end.
/// K's need nothing: cuDNN selects by the mask before the softmax.
void clear_tails(const AttendParams& params, std::int32_t tile, CUstream_st* stream);

/// Where cuDNN's stats of (sequence b, token i, head h) lie.
struct StatsStrides {
  bool packed = true;  ///< [tokens, num_q_heads] in batch order; the strides are not looked at.
  std::int64_t seq = 0;
  std::int64_t token = 0;
  std::int64_t head = 0;
};

/// Sets the output's padding rows and rows without keys to 0, and writes params.lse (if not null)
/// from cuDNN's stats, -inf in its padding rows and in rows without keys.
void finish_step(const AttendParams& params, const float* stats, const StatsStrides& strides,
                 CUstream_st* stream);

}  // namespace octavo::kernels::fused
