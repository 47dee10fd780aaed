// SPDX-License-Identifier: Apache-2.0
// From a call to the graph that serves it: buckets, page cuts, the workspace's layout. Plain integers;
// tested without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cudnn/fused.h"
#include "kernels/cudnn/graph.h"
#include "kernels/cudnn/step_arrays.h"

namespace octavo::kernels::fused {

/// n rounded up so that there are four buckets an octave; exact up to 8.
std::int64_t bucket(std::int64_t n);

/// How the pages are cut; `slots` 0 where cuDNN can walk K and V without a table. `num_seqs` is the
/// graph's.
PageCut cut_pages(const StepBatch& batch, const KvPages& kv, std::int64_t num_seqs);

/// Whether the strides allow a cut at all: pages (or rows) that start a whole number of slots apart.
bool can_cut(const KvPages& kv);

GraphKey graph_key(const AttendParams& params, const Maxima& maxima);
PageCut cut_of(const AttendParams& params, const GraphKey& key);

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
