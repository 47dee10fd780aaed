// SPDX-License-Identifier: Apache-2.0
// The rows of the outputs that no token of the step owns.

#include "kernels/cpu/output.h"

namespace octavo::kernels::cpu {
namespace {

void clear_token_row(const AttendParams& params, std::int64_t offset) {
  const TokenLayout& layout = params.out_layout;
  for (std::int32_t h = 0; h < params.num_q_heads; ++h) {
    store_row(params.out, params.out_dtype, offset + h * layout.head_stride, layout.dim_stride,
              params.head_dim_v, [](std::int32_t) { return 0.0F; });
  }
}

}  // namespace

void pad_output(const AttendParams& params) {
  const TokenLayout& layout = params.out_layout;
  const StepBatch& batch = params.batch;
  if (layout.ragged) {
    for (std::int64_t i = batch.num_tokens; i < layout.num_token_rows; ++i) {
      clear_token_row(params, i * layout.token_stride);
    }
  } else {
    for (std::int32_t b = 0; b < layout.num_batch_rows; ++b) {
      const std::int64_t used = b < batch.num_seqs ? new_tokens(batch, b) : 0;
      for (std::int64_t i = used; i < layout.num_token_rows; ++i) {
        clear_token_row(params, b * layout.batch_stride + i * layout.token_stride);
      }
    }
  }
  if (params.lse == nullptr) return;
  for (std::int64_t i = batch.num_tokens; i < params.num_lse_rows; ++i) {
    for (std::int32_t h = 0; h < params.num_q_heads; ++h) {
      params.lse[i * params.lse_token_stride + h * params.lse_head_stride] =
          -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace octavo::kernels::cpu
