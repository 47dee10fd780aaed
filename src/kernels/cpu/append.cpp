// SPDX-License-Identifier: Apache-2.0
// Append: one pass over the step's new tokens, each written by one thread.

#include <omp.h>

#include <array>
#include <cstddef>
#include <cstring>

#include "kernels/cpu/elements.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/rope.h"

namespace octavo::kernels::cpu {
namespace {

struct Source {
  const void* data;
  DType dtype;
  const TokenLayout& layout;
};

void copy_head(const Source& from, std::int64_t from_offset, const PagedTensor& to, DType to_dtype,
               std::int64_t to_offset, std::int32_t dim) {
  if (from.dtype == to_dtype && from.layout.dim_stride == 1 && to.dim_stride == 1) {
    const std::int64_t size = dtype_bytes(to_dtype);
    std::memcpy(static_cast<char*>(to.data) + to_offset * size,
                static_cast<const char*>(from.data) + from_offset * size,
                static_cast<std::size_t>(dim * size));
    return;
  }
  std::array<float, kMaxHeadDim> row;
  load_row(from.data, from.dtype, from_offset, from.layout.dim_stride, dim, row.data());
  store_row(to.data, to_dtype, to_offset, to.dim_stride, dim,
            [&](std::int32_t d) { return row[static_cast<std::size_t>(d)]; });
}

void rotate_head(const AppendParams& params, const Source& from, std::int64_t from_offset,
                 std::int64_t to_offset, const Angles& angles) {
  std::array<float, kMaxHeadDim> row;
  load_row(from.data, from.dtype, from_offset, from.layout.dim_stride, params.head_dim, row.data());
  rotate(params.rope, angles, row.data());
  store_row(params.kv.k.data, params.kv.dtype, to_offset, params.kv.k.dim_stride, params.head_dim,
            [&](std::int32_t d) { return row[static_cast<std::size_t>(d)]; });
}

void clear_slot(const PagedTensor& tensor, DType dtype, std::int64_t offset, std::int32_t heads,
                std::int32_t dim) {
  for (std::int32_t h = 0; h < heads; ++h) {
    store_row(tensor.data, dtype, offset + h * tensor.head_stride, tensor.dim_stride, dim,
              [](std::int32_t) { return 0.0F; });
  }
}

void append_token(const AppendParams& params, const RopeAngles& rope, std::int32_t token) {
  const StepBatch& batch = params.batch;
  const std::int32_t b = row_of_token(batch, token);
  const std::int32_t i = token - batch.token_offsets[b];
  const std::int64_t position = position_of(batch, b, i);
  const SlotWalk slot(batch, params.kv, b, position);

  const Source k{params.k, params.k_dtype, params.k_layout};
  const Source v{params.v, params.v_dtype, params.v_layout};
  const std::int64_t k_from = token_offset(k.layout, batch, b, i);
  const std::int64_t v_from = token_offset(v.layout, batch, b, i);
  const std::int64_t k_to = slot.offset(params.kv.k);
  const std::int64_t v_to = slot.offset(params.kv.v);

  std::array<float, std::size_t{2} * kMaxRotaryPairs> buffer;
  Angles angles{};
  const bool turns = params.rope.rotary_dim > 0;
  if (turns) angles = rope.at(token, position, buffer.data());

  for (std::int32_t h = 0; h < params.num_kv_heads; ++h) {
    const std::int64_t k_head = k_from + h * k.layout.head_stride;
    const std::int64_t k_slot = k_to + h * params.kv.k.head_stride;
    if (turns) {
      rotate_head(params, k, k_head, k_slot, angles);
    } else {
      copy_head(k, k_head, params.kv.k, params.kv.dtype, k_slot, params.head_dim);
    }
    copy_head(v, v_from + h * v.layout.head_stride, params.kv.v, params.kv.dtype,
              v_to + h * params.kv.v.head_stride, params.head_dim_v);
  }
}

// The slots lie in the page of the sequence's last token, which the sequence owns alone.
void clear_behind(const AppendParams& params, std::int32_t b) {
  const StepBatch& batch = params.batch;
  const std::int32_t count = batch.clear_lens[b];
  if (count == 0) return;
  const std::int64_t last = std::int64_t{batch.kv_lens[b]} - 1;
  const std::int64_t page =
      page_of(batch, b, static_cast<std::int32_t>(last / params.kv.page_size));
  for (std::int32_t i = 1; i <= count; ++i) {
    const std::int64_t slot = last % params.kv.page_size + i;
    clear_slot(params.kv.k, params.kv.dtype,
               page * params.kv.k.page_stride + slot * params.kv.k.slot_stride, params.num_kv_heads,
               params.head_dim);
    clear_slot(params.kv.v, params.kv.dtype,
               page * params.kv.v.page_stride + slot * params.kv.v.slot_stride, params.num_kv_heads,
               params.head_dim_v);
  }
}

// Bytes below which a second thread would take longer to wake than to help.
constexpr std::int64_t kOneThreadBytes = 1 << 15;

int threads_for(const AppendParams& params) {
  const std::int64_t bytes = std::int64_t{params.batch.num_tokens} * params.num_kv_heads *
                             (params.head_dim + params.head_dim_v) * dtype_bytes(params.kv.dtype);
  return bytes < kOneThreadBytes ? 1 : resolve_threads(params.num_threads);
}

}  // namespace

void append(const AppendParams& params, const float* turns) {
  const RopeAngles rope(params.rope, turns);
  const std::int32_t num_tokens = params.batch.num_tokens;
  const std::int32_t num_seqs = params.batch.clear_lens != nullptr ? params.batch.num_seqs : 0;
  const int threads = threads_for(params);
  if (threads == 1) {
    for (std::int32_t token = 0; token < num_tokens; ++token) append_token(params, rope, token);
    for (std::int32_t b = 0; b < num_seqs; ++b) clear_behind(params, b);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static) nowait
    for (std::int32_t token = 0; token < num_tokens; ++token) append_token(params, rope, token);
#pragma omp for schedule(static) nowait
    for (std::int32_t b = 0; b < num_seqs; ++b) clear_behind(params, b);
  }
}

void compute_turns(const StepBatch& batch, const RopeParams& rope, int num_threads, float* turns) {
  const RopeAngles angles(rope);
#pragma omp parallel for schedule(static) \
    num_threads(num_threads) if (batch.num_tokens > kFewAngles)
  for (std::int32_t token = 0; token < batch.num_tokens; ++token) {
    const std::int32_t b = row_of_token(batch, token);
    static_cast<void>(angles.at(token, position_of(batch, b, token - batch.token_offsets[b]),
                                turns + std::int64_t{token} * rope.rotary_dim));
  }
}

}  // namespace octavo::kernels::cpu
