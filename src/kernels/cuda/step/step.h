// SPDX-License-Identifier: Apache-2.0
// The kernels of begin: the scatter of a step's integers to their fixed addresses, and page copies.
// They read their lists from pinned host memory, so that a step is uploaded by one launch. Each
// function returns a cudaError_t.
#pragma once

#include <octavo/plan.h>

#include <cstdint>

#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::cuda {

/// The device's arrays of a step, at fixed addresses sized by what the cache can hold. Behind the
/// step's sequences they say: no tokens, no length.
struct ResidentStep {
  std::int32_t* token_offsets = nullptr;  ///< [max_num_seqs + 1]
  std::int32_t* kv_lens = nullptr;        ///< [max_num_seqs]
  std::int32_t* rows = nullptr;           ///< [max_num_seqs]
  std::int32_t* clear_lens = nullptr;     ///< [max_num_seqs]
  std::int32_t* page_table = nullptr;     ///< [max_num_seqs, page_table_stride]
  TokenSlot* token_slots = nullptr;       ///< [max_tokens]
  TokenIndex* token_indices = nullptr;    ///< [max_tokens]
  std::int32_t max_num_seqs = 0;
  std::int64_t page_table_stride = 0;
  std::int64_t max_tokens = 0;
};

/// A step, or one part of its page-table entries with what the others say of the sequences
/// repeated.
struct ScatterParams {
  ResidentStep to;
  std::int32_t page_size = 0;
  std::int32_t num_seqs = 0;
  std::int32_t num_tokens = 0;
  const std::int32_t* token_offsets = nullptr;  ///< [num_seqs + 1]
  const std::int32_t* kv_lens = nullptr;
  const std::int32_t* rows = nullptr;
  const std::int32_t* clear_lens = nullptr;
  const std::int32_t* first_entries = nullptr;  ///< As a StepPlan's.
  const std::int32_t* entry_offsets = nullptr;  ///< [num_seqs + 1]
  const std::int32_t* entries = nullptr;        ///< [num_entries], from entry first_entry on
  std::int32_t first_entry = 0;
  std::int32_t num_entries = 0;
};
/// Writes a token's slot in the part that has its page.
int scatter_step(const ScatterParams& params, CUstream_st* stream);

/// Copies in one launch: no destination is another's source or destination.
struct PageCopyParams {
  const PageCopy* copies = nullptr;  ///< [num_copies]
  std::int32_t num_copies = 0;
  std::int32_t most_slots = 0;  ///< Of any of the copies.
  std::int32_t num_layers = 0;
  PagedTensor k, v;  ///< Of layer 0.
  std::int64_t k_layer_stride = 0;
  std::int64_t v_layer_stride = 0;
  std::int32_t element_bytes = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t head_dim_v = 0;
};
int copy_pages(const PageCopyParams& params, CUstream_st* stream);

}  // namespace octavo::kernels::cuda
