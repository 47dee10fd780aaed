// SPDX-License-Identifier: Apache-2.0
// New tokens from format to format, pages to contiguous rows, and tokens to their pages.
#pragma once

#include <octavo/attention.h>
#include <octavo/export.h>
#include <octavo/tensor.h>
#include <octavo/types.h>

#include <cstdint>

namespace octavo {

/// Copies the new tokens of a step from one format to another, converting the dtype where they
/// differ.
///
/// Of `step`, num_seqs, num_tokens and token_offsets are used; they lie in memory of the tensors'
/// device. Shapes: as in LayerInputs, with the same heads and dim. Padding rows of `to` become 0;
/// padding rows of `from` are never read. Dtypes: F32, F16, BF16 each. Strides: any; `to` must not
/// overlap itself. Errors: InvalidArgument; on a GPU, where the host does not see token_offsets,
/// not for what is wrong in them. Sync: enqueues on `stream`; on the CPU, done when it returns.
OCTAVO_EXPORT void convert_tokens(const ConstTensorView& from, TensorFormat from_format,
                                  const TensorView& to, TensorFormat to_format,
                                  const StepArrays& step, Stream stream = {});

/// Gathers the keys and values of each sequence through the page table: position j of sequence b
/// goes to row [b, j]; rows behind a sequence's end become 0.
///
/// Of `step`, num_seqs and kv_lens are used; they, and the page table, lie in memory of the
/// tensors' device. Shapes: k [>= num_seqs, L, num_kv_heads, head_dim], v the same with head_dim_v;
/// positions from L on are left out. Dtypes: F32, F16, BF16 each. Strides: any. Errors:
/// InvalidArgument; on a GPU, where the host sees neither table nor lengths, rows outside the table
/// and page ids outside the pool read as 0. Sync: as convert_tokens.
OCTAVO_EXPORT void gather_cache(const KvView& cache, const StepArrays& step, const TensorView& k,
                                const TensorView& v, Stream stream = {});

/// The same for a layer of our own cache, at the step that was begun last.
OCTAVO_EXPORT void gather_cache(const StepPlan& plan, const KvCache& cache, std::int32_t layer,
                                const TensorView& k, const TensorView& v, Stream stream = {});

/// Tokens of sequences whose pages lie end to end in one list: token i is at positions[i] of
/// sequence seqs[i], whose pages are the entries page_offsets[s] … page_offsets[s + 1] - 1.
struct ListedTokens {
  const std::int32_t* seqs = nullptr;          ///< [num_tokens]
  const std::int32_t* positions = nullptr;     ///< [num_tokens]
  const std::int32_t* page_offsets = nullptr;  ///< [num_seqs + 1]
  std::int32_t num_tokens = 0;
  std::int32_t num_seqs = 0;
  std::int32_t num_pages = 0;  ///< Entries of the list.
  std::int32_t page_size = 0;
  Device device;  ///< Where all arrays lie.
};

/// Makes a sequence of its own of each token, for append_tokens with the list as a page table of
/// one column: rows[i] is the entry of its page, kv_lens[i] its place there, counted from 1. A
/// token without a sequence (seqs outside 0 … num_seqs - 1), at a negative position or beyond its
/// sequence's pages gets row -1: append_tokens leaves it out on a GPU, and refuses it on the CPU.
///
/// Shapes: rows, kv_lens [num_tokens], all of it written; those of `tokens` as there. Dtypes:
/// int32. Units: positions and page_size in tokens, page_offsets and rows in entries of the list.
/// Layout: dense; all arrays lie in memory of tokens.device. Errors: InvalidArgument for a negative
/// count, a page_size below 1, an array that is missing or lies elsewhere; DeviceFailure,
/// NotCompiled where the GPU is not there. What is in the arrays is never an error. Sync: enqueues
/// one kernel on `stream`; on the CPU, done when it returns. Thread safety: free.
OCTAVO_EXPORT void locate_tokens(const ListedTokens& tokens, std::int32_t* rows,
                                 std::int32_t* kv_lens, Stream stream = {});

}  // namespace octavo
