// SPDX-License-Identifier: Apache-2.0
// The public merge of partials, in float32 and in the order given.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/elements.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/output.h"

namespace octavo::kernels::cpu {
namespace {

void merge_row(const MergeParams& params, std::int64_t token, std::int32_t head) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const auto lse_of = [&](const MergePartial& partial) {
    return partial.lse[token * partial.lse_token_stride + head * partial.lse_head_stride];
  };
  const auto place = [&](const MergeTensor& tensor) {
    return token * tensor.token_stride + head * tensor.head_stride;
  };

  float max = kNothing;
  for (std::int32_t i = 0; i < params.num_partials; ++i) {
    max = std::max(max, lse_of(params.partials[i]));
  }
  std::array<float, kMaxHeadDim> weighted{};
  std::array<float, kMaxHeadDim> part;
  float sum = 0.0F;
  for (std::int32_t i = 0; i < params.num_partials; ++i) {
    const MergePartial& partial = params.partials[i];
    const float lse = lse_of(partial);
    if (lse == kNothing) continue;
    const float weight = std::exp(lse - max);
    sum += weight;
    load_row(partial.out.data, partial.out.dtype, place(partial.out), partial.out.dim_stride,
             params.head_dim_v, part.data());
    for (std::size_t d = 0; d < static_cast<std::size_t>(params.head_dim_v); ++d) {
      weighted[d] += weight * part[d];
    }
  }

  const RowState<float> row{weighted.data(), max, sum};
  const float factor = output_factor(row, params.sinks, head);
  store_row(const_cast<void*>(params.out.data), params.out.dtype, place(params.out),
            params.out.dim_stride, params.head_dim_v,
            [&](std::int32_t d) { return row.weighted[d] * factor; });
  if (params.lse != nullptr) {
    params.lse[token * params.lse_token_stride + head * params.lse_head_stride] =
        sum == 0.0F ? kNothing : max + std::log(sum);
  }
}

}  // namespace

void merge_partials(const MergeParams& params) {
#pragma omp parallel for schedule(static) num_threads(resolve_threads(params.num_threads))
  for (std::int64_t token = 0; token < params.num_tokens; ++token) {
    for (std::int32_t head = 0; head < params.num_heads; ++head) merge_row(params, token, head);
  }
}

}  // namespace octavo::kernels::cpu
