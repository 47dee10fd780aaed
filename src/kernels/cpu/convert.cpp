// SPDX-License-Identifier: Apache-2.0
// Tokens from format to format, and pages to rows. A thread moves a row of heads.
#include <omp.h>

#include "kernels/cpu/elements.h"
#include "kernels/cpu/kernels.h"

namespace octavo::kernels::cpu {
namespace {

struct Element {
  const void* data;
  DType dtype;
  std::int64_t offset;
};

float value_of(const Element& from) { return load_element(from.data, from.dtype, from.offset); }

void convert_row(const ConvertParams& p, std::int64_t row) {
  const TokenLayout& t = p.to_layout;
  std::int32_t b = 0;
  std::int32_t i = 0;
  std::int64_t to = row * t.token_stride;
  bool is_token = row < p.batch.num_tokens;
  if (t.ragged) {
    if (is_token) {
      b = row_of_token(p.batch, static_cast<std::int32_t>(row));
      i = static_cast<std::int32_t>(row) - p.batch.token_offsets[b];
    }
  } else {
    b = static_cast<std::int32_t>(row / t.num_token_rows);
    i = static_cast<std::int32_t>(row % t.num_token_rows);
    to = b * t.batch_stride + i * t.token_stride;
    is_token = b < p.batch.num_seqs && i < new_tokens(p.batch, b);
  }
  const std::int64_t from = is_token ? token_offset(p.from_layout, p.batch, b, i) : 0;
  for (std::int32_t h = 0; h < p.num_heads; ++h) {
    for (std::int32_t d = 0; d < p.dim; ++d) {
      const std::int64_t at = from + h * p.from_layout.head_stride + d * p.from_layout.dim_stride;
      store_element(p.to, p.to_dtype, to + h * t.head_stride + d * t.dim_stride,
                    is_token ? value_of({p.from, p.from_dtype, at}) : 0.0F);
    }
  }
}

void gather_row(const GatherParams& p, std::int32_t n, std::int64_t position) {
  const std::int32_t b = p.first_seq + n;
  const bool is_token = position < p.batch.kv_lens[b];
  std::int64_t from = 0;
  if (is_token) {
    const auto page_idx = static_cast<std::int32_t>(position / p.page_size);
    from = page_of(p.batch, b, page_idx) * p.from.page_stride +
           position % p.page_size * p.from.slot_stride;
  }
  const std::int64_t to = n * p.to_seq_stride + position * p.to_slot_stride;
  for (std::int32_t h = 0; h < p.num_heads; ++h) {
    for (std::int32_t d = 0; d < p.padded_dim; ++d) {
      const std::int64_t at =
          from + (p.first_head + h) * p.from.head_stride + d * p.from.dim_stride;
      store_element(p.to, p.to_dtype, to + h * p.to_head_stride + d * p.to_dim_stride,
                    is_token && d < p.dim ? value_of({p.from.data, p.from_dtype, at}) : 0.0F);
    }
  }
}

}  // namespace

void convert_tokens(const ConvertParams& params) {
  const TokenLayout& t = params.to_layout;
  const std::int64_t rows = t.ragged ? t.num_token_rows : t.num_token_rows * t.num_batch_rows;
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < rows; ++row) convert_row(params, row);
}

void gather_pages(const GatherParams& params) {
  const std::int64_t rows = params.num_seqs * params.num_slots;
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < rows; ++row) {
    gather_row(params, static_cast<std::int32_t>(row / params.num_slots), row % params.num_slots);
  }
}

}  // namespace octavo::kernels::cpu
