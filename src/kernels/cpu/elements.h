// SPDX-License-Identifier: Apache-2.0
// Single elements of F32, F16 and BF16 tensors, and the rows of new tokens. Not for inner loops.
#pragma once

#include <octavo/types.h>

#include <cstdint>

#include "base/convert.h"
#include "kernels/params.h"

namespace octavo::kernels::cpu {

inline float load_element(const void* data, DType dtype, std::int64_t offset) {
  if (dtype == DType::F32) return static_cast<const float*>(data)[offset];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[offset];
  return dtype == DType::F16 ? base::f16_to_float(bits) : base::bf16_to_float(bits);
}

inline void store_element(void* data, DType dtype, std::int64_t offset, float value) {
  if (dtype == DType::F32) {
    static_cast<float*>(data)[offset] = value;
  } else {
    static_cast<std::uint16_t*>(data)[offset] =
        dtype == DType::F16 ? base::float_to_f16(value) : base::float_to_bf16(value);
  }
}

/// to[d] = value(d), d in [0, dim), elements `stride` apart.
template <typename T, typename ValueT>
void fill_row(T* to, std::int64_t stride, std::int32_t dim, ValueT value) {
  if (stride == 1) {
#pragma omp simd
    for (std::int32_t d = 0; d < dim; ++d) to[d] = value(d);
  } else {
    for (std::int32_t d = 0; d < dim; ++d) to[d * stride] = value(d);
  }
}

/// Reads a row of `dim` elements, `stride` apart, to float.
inline void load_row(const void* data, DType dtype, std::int64_t offset, std::int64_t stride,
                     std::int32_t dim, float* to) {
  if (dtype == DType::F32) {
    const float* from = static_cast<const float*>(data) + offset;
    return fill_row(to, 1, dim, [&](std::int32_t d) { return from[d * stride]; });
  }
  const std::uint16_t* from = static_cast<const std::uint16_t*>(data) + offset;
  if (dtype == DType::F16) {
    return fill_row(to, 1, dim,
                    [&](std::int32_t d) { return base::f16_to_float(from[d * stride]); });
  }
  fill_row(to, 1, dim, [&](std::int32_t d) { return base::bf16_to_float(from[d * stride]); });
}

/// Writes value(d) for d in [0, dim) to elements `stride` apart.
template <typename ValueT>
void store_row(void* data, DType dtype, std::int64_t offset, std::int64_t stride, std::int32_t dim,
               ValueT value) {
  if (dtype == DType::F32) {
    return fill_row(static_cast<float*>(data) + offset, stride, dim, value);
  }
  std::uint16_t* to = static_cast<std::uint16_t*>(data) + offset;
  if (dtype == DType::F16) {
    return fill_row(to, stride, dim, [&](std::int32_t d) { return base::float_to_f16(value(d)); });
  }
  fill_row(to, stride, dim, [&](std::int32_t d) { return base::float_to_bf16(value(d)); });
}

/// Element offset of token `i` of batch row `b`, head 0.
inline std::int64_t token_offset(const TokenLayout& layout, const StepBatch& batch, std::int32_t b,
                                 std::int32_t i) {
  if (layout.ragged) return (std::int64_t{batch.token_offsets[b]} + i) * layout.token_stride;
  return b * layout.batch_stride + i * layout.token_stride;
}

inline std::int32_t new_tokens(const StepBatch& batch, std::int32_t b) {
  return batch.token_offsets[b + 1] - batch.token_offsets[b];
}

/// Position of token `i` of batch row `b`. Negative where a row has more new tokens than keys.
inline std::int64_t position_of(const StepBatch& batch, std::int32_t b, std::int32_t i) {
  return std::int64_t{batch.kv_lens[b]} - new_tokens(batch, b) + i;
}

/// The batch row that packed token `token` belongs to; rows without tokens own none.
inline std::int32_t row_of_token(const StepBatch& batch, std::int32_t token) {
  std::int32_t low = 0, high = batch.num_seqs;
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    (batch.token_offsets[middle] <= token ? low : high) = middle;
  }
  return low;
}

/// Walks the slots of one sequence from a position on: a division at the start, none after.
class SlotWalk {
 public:
  SlotWalk(const StepBatch& batch, const KvPages& kv, std::int32_t b, std::int64_t position)
      : batch_(batch),
        kv_(kv),
        b_(b),
        page_idx_(static_cast<std::int32_t>(position / kv.page_size)),
        slot_(static_cast<std::int32_t>(position % kv.page_size)) {
    page_ = page_of(batch_, b_, page_idx_);
  }

  [[nodiscard]] std::int64_t offset(const PagedTensor& tensor) const {
    return page_ * tensor.page_stride + slot_ * tensor.slot_stride;
  }

  /// To the next position, which the sequence must have: its page is looked up.
  void advance() {
    if (++slot_ < kv_.page_size) return;
    slot_ = 0;
    page_ = page_of(batch_, b_, ++page_idx_);
  }

 private:
  const StepBatch& batch_;
  const KvPages& kv_;
  std::int32_t b_;
  std::int32_t page_idx_;
  std::int32_t slot_;
  std::int64_t page_ = 0;
};

}  // namespace octavo::kernels::cpu
