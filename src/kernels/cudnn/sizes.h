// SPDX-License-Identifier: Apache-2.0
// From a call to the graph that serves it: buckets, page cuts, the workspace's layout. Plain
// integers; tested without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cudnn/fused.h"
#include "kernels/cudnn/graph.h"
#include "kernels/cudnn/step_arrays.h"

namespace octavo::kernels::fused {

/// n rounded up so that there are four buckets an octave; exact up to 8.
std::int64_t bucket(std::int64_t n);

/// How the pages are cut for a table of parts.
PageCut cut_pages(const KvPages& kv);

/// Whether the strides allow a cut at all: pages (or rows) that start a whole number of slots
/// apart.
bool can_cut(const KvPages& kv);

/// Elements from one row of tokens to the next, where all lie evenly; else 0.
std::int64_t row_stride(const TokenLayout& layout);

/// How a call is given to cuDNN.
struct CallShape {
  BatchRows rows = BatchRows::Sequences;
  GraphKey key;
  PageCut cut;                  ///< slots 0 without a table.
  std::int64_t first_page = 0;  ///< Of batch row 0, without a table.
  StatsStrides stats;
};
CallShape call_shape(const AttendParams& params, const Maxima& maxima,
                     std::int32_t max_tokens_as_rows);

/// Offsets in bytes from the workspace's start; each aligned to 256.
struct WorkspaceLayout {
  std::size_t q_lens = 0, kv_lens = 0;
  std::size_t q_offsets = 0, out_offsets = 0, stats_offsets = 0;
  std::size_t k_table = 0, v_table = 0;
  std::size_t stats = 0;
  std::size_t cudnn = 0;
  std::size_t num_bytes = 0;
};
WorkspaceLayout workspace_layout(const GraphKey& key, std::int64_t max_tokens,
                                 std::size_t cudnn_bytes);

}  // namespace octavo::kernels::fused
