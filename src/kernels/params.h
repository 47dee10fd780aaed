// SPDX-License-Identifier: Apache-2.0
// What kernels are told: small trivially copyable structs that dispatch fills from plans, caches
// and tensor views. Host and device kernels share them. Pointers are to memory of the kernel's
// device. All strides are in elements.
#pragma once

#include <octavo/attention.h>
#include <octavo/types.h>

#include <cstdint>

namespace octavo::kernels {

/// The widest head, of K and of V.
constexpr std::int32_t kMaxHeadDim = 576;

/// How the rows of new tokens are addressed. Row of token i of batch row b:
/// ragged: (token_offsets[b] + i) * token_stride; otherwise: b * batch_stride + i * token_stride.
struct TokenLayout {
  bool ragged = true;
  std::int64_t batch_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t dim_stride = 1;
  std::int32_t num_batch_rows = 0;  ///< Extent of the batch axis (bshd, sbhd).
  std::int64_t num_token_rows =
      0;  ///< Extent of the token axis; rows beyond the step's are padding.
};

/// One tensor of the cache's pages: [num_pages, page_size, heads, dim] by strides.
struct PagedTensor {
  void* data = nullptr;
  std::int64_t page_stride = 0;
  std::int64_t slot_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t dim_stride = 1;
};

/// Keys and values of one layer.
struct KvPages {
  PagedTensor k, v;
  DType dtype = DType::F32;
  std::int64_t num_pages = 0;
  std::int32_t page_size = 0;
};

/// Where a new token goes. The kernels that make a step on a GPU write one for each of its tokens,
/// so that append finds it by one load in every layer.
struct alignas(16) TokenSlot {
  std::int32_t page = -1;      ///< -1: the token is not written.
  std::int32_t slot = 0;       ///< Of the page.
  std::int32_t position = 0;   ///< In its sequence.
  std::int32_t num_clear = 0;  ///< Slots behind it, in the same page, to clear.

  friend bool operator==(const TokenSlot&, const TokenSlot&) = default;
};

/// A new token's place in the step: batch row, and index among the row's new tokens.
struct alignas(8) TokenIndex {
  std::int32_t b = 0;
  std::int32_t i = 0;

  friend bool operator==(const TokenIndex&, const TokenIndex&) = default;
};

/// The step: which rows, how many tokens, how long.
struct StepBatch {
  std::int32_t num_seqs = 0;
  std::int32_t num_tokens = 0;
  const std::int32_t* token_offsets = nullptr;  ///< [num_seqs + 1]
  const std::int32_t* kv_lens = nullptr;        ///< [num_seqs], new tokens included
  const std::int32_t* rows = nullptr;           ///< [num_seqs], or null: row b
  const std::int32_t* page_table =
      nullptr;  ///< [.., page_table_stride], or null: the row is the page
  std::int64_t page_table_stride = 0;
  const std::int32_t* clear_lens =
      nullptr;  ///< [num_seqs] or null: nothing to clear behind the new end
  const TokenSlot* token_slots = nullptr;     ///< [max_token_slots], packed order; on a GPU
  const TokenIndex* token_indices = nullptr;  ///< Likewise.
  std::int64_t max_token_slots = 0;           ///< No step has more tokens.
};

/// What the host knows of a step's lengths: each of them, or maxima alone.
struct StepLengths {
  StepBatch batch;  ///< In host memory; not looked at when bounded.
  bool bounded = false;
  StepMaxima maxima = {};  ///< When bounded.
  /// Where each sequence lies in one page: batch row b in page first_page + b. -1: not so, or not
  /// known, or not to be used, since the call is captured and replayed with other pages.
  std::int32_t first_page = -1;
  /// A contiguous cache of ours: each sequence has one page to itself, in this step and in others.
  bool one_page_each = false;
};

/// The maxima that are known, or those of the step's own lengths.
constexpr StepMaxima maxima_of(const StepLengths& lengths) {
  if (lengths.bounded) return lengths.maxima;
  const StepBatch& batch = lengths.batch;
  StepMaxima maxima{.num_seqs = batch.num_seqs, .num_tokens = batch.num_tokens};
  for (std::int32_t b = 0; b < batch.num_seqs; ++b) {
    const std::int32_t new_tokens = batch.token_offsets[b + 1] - batch.token_offsets[b];
    if (new_tokens > maxima.max_new_tokens) maxima.max_new_tokens = new_tokens;
    if (batch.kv_lens[b] > maxima.max_kv_len) maxima.max_kv_len = batch.kv_lens[b];
  }
  return maxima;
}

/// A step over a cache of the caller's in device memory, where the host has seen no length.
struct CallersStep {
  StepBatch batch;             ///< The caller's arrays; num_seqs and num_tokens are maxima.
  std::int64_t num_pages = 0;  ///< Of the pool.
  std::int64_t num_rows = 0;   ///< Of the page table; without one, of the pool.
  std::int32_t page_size = 0;  ///< Slots.
  std::int64_t max_slots = 0;  ///< That a row can name.
  StepMaxima maxima = {};
};

/// Page that holds slot position `position` of batch row `b`; 0 <= position < kv_lens[b].
constexpr std::int32_t page_of(const StepBatch& batch, std::int32_t b, std::int32_t page_idx) {
  const std::int32_t row = batch.rows != nullptr ? batch.rows[b] : b;
  if (batch.page_table == nullptr) return row;
  return batch.page_table[static_cast<std::int64_t>(row) * batch.page_table_stride + page_idx];
}

/// RoPE with its defaults filled in; rotary_dim 0: none.
struct RopeParams {
  RopeStyle style = RopeStyle::Half;
  std::int32_t rotary_dim = 0;
  double base = 10000.0;
  const float* cos = nullptr;  ///< [.., rotary_dim / 2], or null: computed
  const float* sin = nullptr;
  std::int64_t num_table_positions = 0;
  const std::int32_t* positions = nullptr;  ///< [num_tokens], or null: kv_len - n + i
};

struct AppendParams {
  StepBatch batch;
  KvPages kv;
  const void* k = nullptr;
  const void* v = nullptr;
  DType k_dtype = DType::F32;
  DType v_dtype = DType::F32;
  TokenLayout k_layout, v_layout;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t head_dim_v = 0;
  RopeParams rope;
  std::int32_t num_threads = 0;
};

/// Rows of tokens from one format to another. Padding rows of `to` become 0; those of `from` are
/// not read.
struct ConvertParams {
  StepBatch batch;  ///< token_offsets, num_seqs and num_tokens alone.
  const void* from = nullptr;
  DType from_dtype = DType::F32;
  TokenLayout from_layout;
  void* to = nullptr;
  DType to_dtype = DType::F32;
  TokenLayout to_layout;
  std::int32_t num_heads = 0;
  std::int32_t dim = 0;
};

/// Slots of pages to rows [num_seqs, num_slots, num_heads, padded_dim] by strides: positions 0 … of
/// batch rows first_seq …, heads first_head …. What lies behind a sequence's end, or behind `dim`,
/// becomes 0.
struct GatherParams {
  StepBatch batch;
  PagedTensor from;
  DType from_dtype = DType::F32;
  std::int64_t num_pages = 0;
  std::int32_t page_size = 0;
  std::int32_t num_rows = 0;   ///< Of the page table; a GPU reads no row beyond.
  std::int64_t max_slots = 0;  ///< Of a row; a GPU reads no position beyond.
  void* to = nullptr;
  DType to_dtype = DType::F32;
  std::int64_t to_seq_stride = 0;
  std::int64_t to_slot_stride = 0;
  std::int64_t to_head_stride = 0;
  std::int64_t to_dim_stride = 1;
  std::int32_t first_seq = 0;
  std::int32_t num_seqs = 0;
  std::int32_t first_head = 0;
  std::int32_t num_heads = 0;
  std::int32_t dim = 0;
  std::int32_t padded_dim = 0;
  std::int64_t num_slots = 0;
};

/// Tokens of sequences whose pages lie in one list: token i is at positions[i] of sequence
/// seqs[i], whose pages are the entries page_offsets[s] … page_offsets[s + 1] - 1 of num_pages.
struct ListedParams {
  const std::int32_t* seqs = nullptr;          ///< [num_tokens]
  const std::int32_t* positions = nullptr;     ///< [num_tokens]
  const std::int32_t* page_offsets = nullptr;  ///< [num_seqs + 1]
  std::int32_t num_tokens = 0;
  std::int32_t num_seqs = 0;
  std::int32_t num_pages = 0;  ///< Entries of the list.
  std::int32_t page_size = 0;
  std::int32_t* rows = nullptr;     ///< [num_tokens]: the entry of the token's page, or -1.
  std::int32_t* kv_lens = nullptr;  ///< [num_tokens]: its place in the page, counted from 1.
};

/// Where a listed token lies.
struct ListedPlace {
  std::int32_t row = -1;
  std::int32_t kv_len = 1;

  friend bool operator==(const ListedPlace&, const ListedPlace&) = default;
};

/// Nowhere when there is no such sequence, or the position is not in its pages.
constexpr ListedPlace place_of_listed(const ListedParams& p, std::int32_t i) {
  const std::int32_t seq = p.seqs[i];
  const std::int32_t position = p.positions[i];
  if (seq < 0 || seq >= p.num_seqs || position < 0) return {};
  const std::int32_t begin = p.page_offsets[seq];
  const std::int32_t end = p.page_offsets[seq + 1];
  const std::int64_t entry = std::int64_t{begin} + position / p.page_size;
  if (begin < 0 || entry >= end || entry >= p.num_pages) return {};
  return {static_cast<std::int32_t>(entry), position % p.page_size + 1};
}

/// How the keys of each sequence are cut among work items. An item is (b, q tile t, split j):
/// tokens [t * q_tile, (t + 1) * q_tile) of batch row b, over key tiles [first + j *
/// split_tiles[b], ...+ split_tiles[b]) where `first` is the first key tile that the q tile sees.
/// Key tile i is positions [i * key_tile, (i + 1) * key_tile). Items of row b are numbered
/// item_offsets[b] + t * num_splits[b] + j. Where num_splits[b] > 1, each item writes partials, row
/// (of Hq heads each) partial_offsets[b] + i * num_splits[b] + j for token i; a split that sees no
/// key leaves LSE -inf.
struct SplitSchedule {
  std::int32_t key_tile = 0;  ///< Positions.
  std::int32_t q_tile = 0;    ///< Tokens.
  std::int64_t num_items = 0;
  std::int64_t num_partial_rows =
      0;  ///< Rows of all partials; one row is num_q_heads outputs and LSEs.
  const std::int64_t* item_offsets = nullptr;     ///< [num_seqs + 1]
  const std::int64_t* partial_offsets = nullptr;  ///< [num_seqs + 1]
  const std::int32_t* split_tiles = nullptr;      ///< [num_seqs]
  const std::int32_t* num_splits = nullptr;  ///< [num_seqs]; 0 for a sequence without new tokens
};

struct AttendParams {
  StepBatch batch;
  KvPages kv;
  const void* q = nullptr;
  DType q_dtype = DType::F32;
  TokenLayout q_layout;
  void* out = nullptr;
  DType out_dtype = DType::F32;
  TokenLayout out_layout;  ///< Its padding rows are to become 0.
  float* lse = nullptr;    ///< [num_lse_rows, num_q_heads] or null; rows from num_tokens on are to
                           ///< become -inf.
  std::int64_t lse_token_stride = 0;
  std::int64_t lse_head_stride = 1;
  std::int64_t num_lse_rows = 0;
  std::int32_t num_q_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t head_dim_v = 0;
  float scale = 1.0F;
  float softcap = 0.0F;  ///< 0: off
  bool causal = true;
  std::int64_t window_left = -1;  ///< -1: no bound
  std::int64_t window_right = -1;
  const float* sinks = nullptr;         ///< [num_q_heads] or null
  const float* alibi_slopes = nullptr;  ///< [num_q_heads] or null
  RopeParams rope;                      ///< Of q.
  bool batch_invariant = false;         ///< A GPU's split depends on the sequence alone.
  std::int32_t num_threads = 0;
};

/// Keys that the query at `position` sees, as positions [begin, end); empty when begin >= end.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
constexpr KeyRange visible_keys(bool causal, std::int64_t window_left, std::int64_t window_right,
                                std::int64_t position, std::int64_t kv_len) {
  KeyRange range{0, kv_len};
  if (window_left >= 0 && position - window_left > 0) range.begin = position - window_left;
  if (causal && position + 1 < range.end) range.end = position + 1;
  if (window_right >= 0 && position + window_right + 1 < range.end)
    range.end = position + window_right + 1;
  if (range.end < 0) range.end = 0;
  return range;
}

}  // namespace octavo::kernels
