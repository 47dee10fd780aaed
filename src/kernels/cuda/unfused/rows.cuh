// SPDX-License-Identifier: Apache-2.0
// Whose a row of a chunk is: what unfused's kernels share.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/step.cuh"
#include "kernels/cuda/unfused/rows.h"

namespace octavo::kernels::cuda {

/// A row of the chunk: token `first_token + t` of batch row `first_seq + n`, query head `head`.
struct Row {
  std::int32_t b;
  std::int32_t i;
  std::int32_t head;
  bool is_token;  // the batch row has such a token
};
/// Row `in_product` of product `product`.
__device__ inline Row row_at(const UnfusedRows& p, std::uint32_t product,
                             std::uint32_t in_product) {
  const auto heads = static_cast<std::uint32_t>(p.chunk.num_heads);
  const auto group = static_cast<std::uint32_t>(p.group);
  Row result;
  result.b = p.chunk.first_seq + static_cast<std::int32_t>(product / heads);
  result.i = p.chunk.first_token + static_cast<std::int32_t>(in_product / group);
  const std::int32_t kv_head = p.chunk.first_head + static_cast<std::int32_t>(product % heads);
  result.head = kv_head * p.group + static_cast<std::int32_t>(in_product % group);
  result.is_token = result.i < new_tokens(p.attend.batch, result.b);
  return result;
}
__device__ inline std::int64_t position_of(const StepBatch& batch, const Row& row) {
  return std::int64_t{batch.kv_lens[row.b]} - new_tokens(batch, row.b) + row.i;
}
inline std::int64_t rows_of_product(const UnfusedRows& p) {
  return std::int64_t{p.chunk.num_tokens} * p.group;
}
inline unsigned num_products(const UnfusedRows& p) {
  return static_cast<unsigned>(p.chunk.num_seqs * p.chunk.num_heads);
}
/// A row of blocks for each product, of `rows` rows a block. There are at most 16 384 products.
inline dim3 grid_of(const UnfusedRows& p, std::int64_t rows) {
  return {grid_for(rows_of_product(p), rows), num_products(p)};
}

}  // namespace octavo::kernels::cuda
