// SPDX-License-Identifier: Apache-2.0
// The end of an attention row: division by the softmax's denominator, sink, output dtype, LSE. Also
// the outputs' padding. Shared by both attentions, by the combination of splits and by `merge`.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/elements.h"
#include "kernels/params.h"

namespace octavo::kernels::cpu {

/// Softmax state of one row: sum of exp(logit - max) and sum of exp(logit - max) * v.
template <typename RealT>
struct RowState {
  const RealT* weighted;  ///< [head_dim_v]
  RealT max;
  RealT sum;  ///< 0: the row saw no key.
};

/// What one over the denominator is. The sink joins it here and nowhere else.
template <typename RealT>
RealT output_factor(const RowState<RealT>& row, const float* sinks, std::int32_t head) {
  if (row.sum == RealT{0}) return RealT{0};
  if (sinks == nullptr) return RealT{1} / row.sum;
  const RealT sink = static_cast<RealT>(sinks[head]);
  // Relative to the larger of the two, so that neither exponential overflows.
  if (sink > row.max) {
    const RealT shrink = std::exp(row.max - sink);
    return shrink / (row.sum * shrink + RealT{1});
  }
  return RealT{1} / (row.sum + std::exp(sink - row.max));
}

/// Writes the LSE of query head `head` of token `i` of batch row `b`, where it is wanted.
template <typename RealT>
void finish_lse(const AttendParams& params, std::int32_t b, std::int32_t i, std::int32_t head,
                const RowState<RealT>& row) {
  if (params.lse == nullptr) return;
  const std::int64_t token = std::int64_t{params.batch.token_offsets[b]} + i;
  params.lse[token * params.lse_token_stride + head * params.lse_head_stride] =
      row.sum == RealT{0} ? -std::numeric_limits<float>::infinity()
                          : static_cast<float>(row.max + std::log(row.sum));
}

/// Writes output and LSE of query head `head` of token `i` of batch row `b`.
template <typename RealT>
void finish_row(const AttendParams& params, std::int32_t b, std::int32_t i, std::int32_t head,
                const RowState<RealT>& row) {
  const TokenLayout& layout = params.out_layout;
  const std::int64_t to = token_offset(layout, params.batch, b, i) + head * layout.head_stride;
  const bool empty = row.sum == RealT{0};
  const RealT factor = output_factor(row, params.sinks, head);
  store_row(
      params.out, params.out_dtype, to, layout.dim_stride, params.head_dim_v,
      [&](std::int32_t d) { return empty ? 0.0F : static_cast<float>(row.weighted[d] * factor); });
  finish_lse(params, b, i, head, row);
}

/// Padding rows of the output become 0, of the LSE -inf. One thread.
void pad_output(const AttendParams& params);

}  // namespace octavo::kernels::cpu
