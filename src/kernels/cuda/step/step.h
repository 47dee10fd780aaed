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

/// The device's arrays of a step, at fixed addresses sized by max_num_seqs. Behind the step's
/// sequences they say: no tokens, no length.
struct ResidentStep {
  std::int32_t* token_offsets = nullptr;  ///< [max_num_seqs + 1]
  std::int32_t* kv_lens = nullptr;        ///< [max_num_seqs]
  std::int32_t* rows = nullptr;           ///< [max_num_seqs]
  std::int32_t* clear_lens = nullptr;     ///< [max_num_seqs]
  std::int32_t* page_table = nullptr;     ///< [max_num_seqs, max_pages_per_seq]
  std::int32_t max_num_seqs = 0;
};

struct ScatterParams {
  ResidentStep to;
  bool has_sequences = true;  ///< False: only entries, the rest of a long list.
  std::int32_t num_seqs = 0;
  std::int32_t num_tokens = 0;
  const std::int32_t* token_offsets = nullptr;  ///< [num_seqs + 1]
  const std::int32_t* kv_lens = nullptr;
  const std::int32_t* rows = nullptr;
  const std::int32_t* clear_lens = nullptr;
  std::int32_t num_entries = 0;
  const std::int64_t* entry_places = nullptr;  ///< [num_entries], elements of page_table
  const std::int32_t* entry_values = nullptr;  ///< [num_entries], page ids
};
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
