// SPDX-License-Identifier: Apache-2.0
// What is behind a KvCache: the sequences, the planner, the bytes, and the plan that layers may
// run.
#pragma once

#include <octavo/cache.h>

#include <memory>

#include "cache/sequence_store.h"
#include "device/host_buffer.h"
#include "kernels/params.h"
#include "plan/planner.h"

namespace octavo::detail {

struct CacheImpl {
  /// `config` with its defaults filled in and checked.
  explicit CacheImpl(const CacheConfig& config);

  CacheConfig config;
  cache::SequenceStore store;
  plan::Planner planner;
  device::HostBuffer keys;    // [num_layers, num_pages, page_size, num_kv_heads, head_dim]
  device::HostBuffer values;  // the same with head_dim_v
  device::HostBuffer workspace;

  /// The page table as the layers see it: what has been begun, not what has been planned since.
  std::unique_ptr<std::int32_t[]> begun_table;  // [max_num_seqs, max_pages_per_seq]
  StepPlan begun;

  /// The storage of a layer that is in range.
  [[nodiscard]] kernels::KvPages pages_of_layer(std::int32_t layer) const;
  /// The begun step over this cache.
  [[nodiscard]] kernels::StepBatch begun_batch() const;
};

}  // namespace octavo::detail
