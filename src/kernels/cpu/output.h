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
template <typename Real>
struct RowState {
  const Real* weighted;  ///< [head_dim_v]
  Real max;
  Real sum;  ///< 0: the row saw no key.
};

/// What one over the denominator is. The sink joins it here and nowhere else.
template <typename Real>
Real output_factor(const RowState<Real>& row, const float* sinks, std::int32_t head) {
  if (row.sum == Real{0}) return Real{0};
  if (sinks == nullptr) return Real{1} / row.sum;
  const Real sink = static_cast<Real>(sinks[head]);
  // Relative to the larger of the two, so that neither exponential overflows.
  if (sink > row.max) {
    const Real shrink = std::exp(row.max - sink);
    return shrink / (row.sum * shrink + Real{1});
  }
  return Real{1} / (row.sum + std::exp(sink - row.max));
}

/// Writes output and LSE of query head `head` of token `i` of batch row `b`.
template <typename Real>
void finish_row(const AttendParams& params, std::int32_t b, std::int32_t i, std::int32_t head,
                const RowState<Real>& row) {
  const TokenLayout& layout = params.out_layout;
  const std::int64_t to = token_offset(layout, params.batch, b, i) + head * layout.head_stride;
  const bool empty = row.sum == Real{0};
  const Real factor = output_factor(row, params.sinks, head);
  store_row(
      params.out, params.out_dtype, to, layout.dim_stride, params.head_dim_v,
      [&](std::int32_t d) { return empty ? 0.0F : static_cast<float>(row.weighted[d] * factor); });
  if (params.lse == nullptr) return;
  const std::int64_t token = std::int64_t{params.batch.token_offsets[b]} + i;
  params.lse[token * params.lse_token_stride + head * params.lse_head_stride] =
      empty ? -std::numeric_limits<float>::infinity()
            : static_cast<float>(row.max + std::log(row.sum));
}

/// Padding rows of the output become 0, of the LSE -inf. One thread.
void pad_output(const AttendParams& params);

}  // namespace octavo::kernels::cpu
