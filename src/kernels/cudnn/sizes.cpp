// SPDX-License-Identifier: Apache-2.0
#include "kernels/cudnn/sizes.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/error.h"

namespace octavo::kernels::fused {
namespace {

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// New tokens of a sequence in thd: only the launch's extent, in cuDNN's tiles.
std::int64_t q_bucket(std::int64_t q_len) {
  constexpr std::int64_t kTile = 128;
  if (q_len <= 1) return 1;
  if (q_len <= kTile / 2) return kTile / 2;
  return round_up(bucket(q_len), kTile);
}

bool is_cut(const PagedTensor& tensor, std::int64_t page_size, std::int64_t slots) {
  // A page in one part needs no arithmetic between pages.
  return slots == page_size || tensor.page_stride % (slots * tensor.slot_stride) == 0;
}

std::int64_t ratio_of(const PagedTensor& tensor, const PageCut& cut, std::int64_t page_size) {
  return cut.slots == page_size ? 1 : tensor.page_stride / (cut.slots * tensor.slot_stride);
}

}  // namespace

std::int64_t bucket(std::int64_t n) {
  if (n <= 8) return std::max<std::int64_t>(n, 1);
  const auto octave = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(n - 1)));
  return round_up(n, octave / 4);
}

bool can_cut(const KvPages& kv) {
  return is_cut(kv.k, kv.page_size, 1) && is_cut(kv.v, kv.page_size, 1);
}

PageCut cut_pages(const KvPages& kv) {
  PageCut cut;
  std::int64_t slots = kTailTile;
  // No part reaches behind its page (or contiguous row), where anything may lie: other tensors too.
  const auto fits = [&](const PagedTensor& tensor) {
    return kv.page_size % slots == 0 && is_cut(tensor, kv.page_size, slots);
  };
  while (slots > 1 && !(fits(kv.k) && fits(kv.v))) slots /= 2;
  cut.slots = static_cast<std::int32_t>(slots);
  cut.per_page = static_cast<std::int32_t>(kv.page_size / slots);
  cut.k_ratio = static_cast<std::int32_t>(ratio_of(kv.k, cut, kv.page_size));
  cut.v_ratio = static_cast<std::int32_t>(ratio_of(kv.v, cut, kv.page_size));
  return cut;
}

std::int64_t row_stride(const TokenLayout& layout) {
  if (layout.ragged) return layout.token_stride;
  const bool batch_outermost = layout.batch_stride >= layout.token_stride;
  const std::int64_t inner = batch_outermost ? layout.token_stride : layout.batch_stride;
  const std::int64_t outer = batch_outermost ? layout.batch_stride : layout.token_stride;
  const std::int64_t num_inner = batch_outermost ? layout.num_token_rows : layout.num_batch_rows;
  const std::int64_t num_outer = batch_outermost ? layout.num_batch_rows : layout.num_token_rows;
  if (num_inner == 1) return outer;
  return num_outer == 1 || outer == num_inner * inner ? inner : 0;
}

namespace {

// Whether row r of both is the same token's.
bool same_rows(const TokenLayout& q, const TokenLayout& out) {
  if (q.ragged) return true;
  const bool same_order =
      q.num_batch_rows == 1 || q.num_token_rows == 1 ||
      (q.batch_stride >= q.token_stride) == (out.batch_stride >= out.token_stride);
  return same_order && q.num_batch_rows == out.num_batch_rows &&
         q.num_token_rows == out.num_token_rows;
}

bool tokens_as_rows(const AttendParams& params, const Maxima& maxima,
                    std::int32_t max_tokens_as_rows) {
  const TokenLayout& q = params.q_layout;
  const std::int64_t q_len = q.ragged ? maxima.q_len : q.num_token_rows;
  if (q_len > max_tokens_as_rows) return false;
  // A row's keys end where its mask ends; a window's begin is counted from there.
  if (params.window_left >= 0 && !params.causal && q_len > 1) return false;
  return row_stride(q) != 0 && row_stride(params.out_layout) != 0 &&
         same_rows(q, params.out_layout);
}

// Rows without a sequence cost cuDNN little, but not nothing.
constexpr std::int64_t kMostPagesOfSequence = 4;

bool pages_as_rows(const AttendParams& params, const Maxima& maxima) {
  return maxima.one_page_each && maxima.first_page < 0 && params.batch.page_table != nullptr &&
         params.kv.num_pages <= kMostPagesOfSequence * maxima.num_seqs;
}

// The axes of q, out and batch.
void set_tokens(const AttendParams& params, const Maxima& maxima, CallShape& shape) {
  const TokenLayout& q = params.q_layout;
  const TokenLayout& out = params.out_layout;
  GraphKey& key = shape.key;
  key.q_head_stride = q.head_stride;
  key.out_head_stride = out.head_stride;
  if (shape.rows == BatchRows::Tokens) {
    key.ragged = false;
    key.q_len = 1;
    // cuDNN writes every row, so there may be no more than the tensors have.
    key.num_seqs = q.ragged
                       ? std::min({bucket(maxima.num_tokens), q.num_token_rows, out.num_token_rows})
                       : q.num_batch_rows * q.num_token_rows;
    key.q_batch_stride = key.q_token_stride = row_stride(q);
    key.out_batch_stride = key.out_token_stride = row_stride(out);
    const bool batch_outermost = q.batch_stride >= q.token_stride;
    shape.stats = {
        .packed = q.ragged,
        .seq = (batch_outermost ? q.num_token_rows : 1) * params.num_q_heads,
        .token = std::int64_t{batch_outermost ? 1 : q.num_batch_rows} * params.num_q_heads,
        .head = 1};
    return;
  }
  const bool pages = shape.rows == BatchRows::Pages;
  key.ragged = q.ragged || pages;
  key.num_seqs = pages      ? params.kv.num_pages
                 : q.ragged ? bucket(maxima.num_seqs)
                            : std::min(q.num_batch_rows, out.num_batch_rows);
  // Rows that only one of the two has are padding, of which out's are for finish_step.
  key.q_len = key.ragged ? q_bucket(maxima.q_len) : std::min(q.num_token_rows, out.num_token_rows);
  key.q_token_stride = q.token_stride;
  key.out_token_stride = out.token_stride;
  key.q_batch_stride = key.ragged ? key.q_len * q.token_stride : q.batch_stride;
  key.out_batch_stride = key.ragged ? key.q_len * out.token_stride : out.batch_stride;
  shape.stats = {
      .packed = key.ragged, .seq = params.num_q_heads * key.q_len, .token = 1, .head = key.q_len};
}

// Whether cuDNN's batch row r is row r of a contiguous cache, or r behind another one.
bool rows_in_order(const AttendParams& params, const Maxima& maxima, const CallShape& shape) {
  const StepBatch& batch = params.batch;
  if (shape.rows == BatchRows::Pages) return true;
  if (batch.page_table != nullptr && maxima.one_page_each && params.kv.num_pages == 1 &&
      shape.key.num_seqs == 1) {
    return true;  // there is no other
  }
  if (batch.page_table != nullptr) {
    // Tokens as rows would win 1 to 5 per cent, and have a graph for each batch size as it is.
    return maxima.first_page >= 0 && shape.rows == BatchRows::Sequences &&
           maxima.first_page + shape.key.num_seqs <= params.kv.num_pages;
  }
  if (batch.rows != nullptr) return false;
  if (shape.key.num_seqs > params.kv.num_pages) return false;
  if (shape.rows == BatchRows::Sequences) return true;
  // A sequence without new tokens has no row.
  return params.q_layout.ragged
             ? maxima.exact && maxima.q_len == 1 && batch.num_tokens == batch.num_seqs &&
                   shape.key.num_seqs == batch.num_tokens
             : params.q_layout.num_token_rows == 1;
}

void set_mask(const AttendParams& params, const Maxima& maxima, CallShape& shape) {
  GraphKey& key = shape.key;
  const bool tokens = shape.rows == BatchRows::Tokens;
  constexpr std::int64_t kFarthest = std::numeric_limits<std::int32_t>::max() - 1;
  // A bound that no position reaches is none: fewer graphs, and the faster kernel.
  const auto bound = [&](std::int64_t window) {
    return window < 0 || window >= maxima.kv_len
               ? -1
               : static_cast<std::int32_t>(std::min(window, kFarthest));
  };
  key.causal = params.causal && !tokens;
  key.window_left = bound(params.window_left);
  key.window_right = params.causal || tokens ? -1 : bound(params.window_right);
}

// Tiles of keys are read whole, table entries too.
constexpr std::int64_t kKeyUnit = 256;

void set_cache(const AttendParams& params, const Maxima& maxima, CallShape& shape) {
  const KvPages& kv = params.kv;
  GraphKey& key = shape.key;
  key.k_slot_stride = kv.k.slot_stride;
  key.k_head_stride = kv.k.head_stride;
  key.v_slot_stride = kv.v.slot_stride;
  key.v_head_stride = kv.v.head_stride;
  key.paged = !rows_in_order(params, maxima, shape);
  const std::int64_t kv_len = round_up(
      bucket((std::max(maxima.kv_len, 1) + kTailTile - 1) / kTailTile) * kTailTile, kKeyUnit);
  if (key.paged) {
    shape.cut = cut_pages(kv);
    key.two_tables = shape.cut.k_ratio != shape.cut.v_ratio;
    key.page_size = shape.cut.slots;
    key.kv_len = kv_len;
    key.num_k_pages = kv.num_pages * shape.cut.k_ratio;
    key.num_v_pages = kv.num_pages * shape.cut.v_ratio;
    OCTAVO_CHECK(std::max(key.num_k_pages, key.num_v_pages) <=
                 std::numeric_limits<std::int32_t>::max());
    key.k_page_stride = kv.k.page_stride / shape.cut.k_ratio;
    key.v_page_stride = kv.v.page_stride / shape.cut.v_ratio;
  } else {
    if (params.batch.page_table != nullptr) shape.first_page = std::max(maxima.first_page, 0);
    key.kv_len = std::min<std::int64_t>(kv_len, kv.page_size);
    key.num_k_pages = key.num_v_pages = kv.num_pages;
    key.k_page_stride = kv.k.page_stride;
    key.v_page_stride = kv.v.page_stride;
  }
}

// Sequences of one length each way, in order, of a bucket's sizes: no lengths are needed. Other
// sizes would want a graph of their own each, which costs more than the mask.
bool is_uniform(const AttendParams& params, const Maxima& maxima, const CallShape& shape) {
  const TokenLayout& q = params.q_layout;
  const TokenLayout& out = params.out_layout;
  if (!maxima.exact || !maxima.uniform || shape.key.paged) return false;
  if (shape.rows != BatchRows::Sequences || maxima.q_len > maxima.kv_len) return false;
  if (maxima.q_len != q_bucket(maxima.q_len) || maxima.kv_len != shape.key.kv_len) return false;
  if (q.ragged) return true;
  return q.num_batch_rows == maxima.num_seqs && q.num_token_rows == maxima.q_len &&
         out.num_token_rows == maxima.q_len;
}

void set_uniform(const AttendParams& params, const Maxima& maxima, CallShape& shape) {
  GraphKey& key = shape.key;
  key.padded = false;
  key.num_seqs = maxima.num_seqs;
  key.q_len = maxima.q_len;
  if (key.ragged) {
    key.ragged = false;
    key.q_batch_stride = key.q_len * params.q_layout.token_stride;
    key.out_batch_stride = key.q_len * params.out_layout.token_stride;
  }
  shape.stats = {
      .packed = false, .seq = params.num_q_heads * key.q_len, .token = 1, .head = key.q_len};
}

}  // namespace

CallShape call_shape(const AttendParams& params, const Maxima& maxima,
                     std::int32_t max_tokens_as_rows) {
  CallShape shape;
  shape.rows = tokens_as_rows(params, maxima, max_tokens_as_rows) ? BatchRows::Tokens
               : pages_as_rows(params, maxima)                    ? BatchRows::Pages
                                                                  : BatchRows::Sequences;
  GraphKey& key = shape.key;
  key.dtype = params.kv.dtype;
  key.stats = params.lse != nullptr;
  key.scale = params.scale;
  key.num_q_heads = params.num_q_heads;
  key.num_kv_heads = params.num_kv_heads;
  key.head_dim = params.head_dim;
  key.head_dim_v = params.head_dim_v;
  set_tokens(params, maxima, shape);
  set_mask(params, maxima, shape);
  set_cache(params, maxima, shape);
  if (is_uniform(params, maxima, shape)) set_uniform(params, maxima, shape);
  return shape;
}

WorkspaceLayout workspace_layout(const GraphKey& key, std::int64_t max_tokens,
                                 std::size_t cudnn_bytes) {
  WorkspaceLayout layout;
  const auto take = [&](std::int64_t num_bytes) {
    const std::size_t at = layout.num_bytes;
    layout.num_bytes += static_cast<std::size_t>(round_up(num_bytes, 256));
    return at;
  };
  const std::int64_t num_seqs = key.num_seqs;
  layout.q_lens = take(num_seqs * 4);
  layout.kv_lens = take(num_seqs * 4);
  if (key.ragged) {
    layout.q_offsets = take((num_seqs + 1) * 8);
    layout.out_offsets = take((num_seqs + 1) * 8);
    layout.stats_offsets = take((num_seqs + 1) * 8);
  }
  if (key.paged) {
    const std::int64_t table_bytes = num_seqs * (key.kv_len / key.page_size) * 4;
    layout.k_table = take(table_bytes);
    if (key.two_tables) layout.v_table = take(table_bytes);
  }
  if (key.stats) {
    const std::int64_t rows = key.ragged ? max_tokens : num_seqs * key.q_len;
    layout.stats = take(rows * key.num_q_heads * 4);
  }
  layout.cudnn = take(static_cast<std::int64_t>(cudnn_bytes));
  return layout;
}

}  // namespace octavo::kernels::fused
