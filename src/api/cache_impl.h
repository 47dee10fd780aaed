// SPDX-License-Identifier: Apache-2.0
// What is behind a KvCache: the sequences, the planner, the bytes, and the plan that layers may
// run.
#pragma once

#include <octavo/cache.h>

#include <memory>

#include "cache/sequence_store.h"
#include "device/buffer.h"
#include "dispatch/gpu.h"
#include "kernels/params.h"
#include "plan/planner.h"

namespace octavo::detail {

struct CacheImpl {
  /// `config` with its defaults filled in and checked.
  explicit CacheImpl(const CacheConfig& config);

  CacheConfig config;
  cache::SequenceStore store;
  plan::Planner planner;
  device::Buffer keys;    // [num_layers, num_pages, page_size, num_kv_heads, head_dim], or empty
  device::Buffer values;  // the same with head_dim_v
  device::HostBuffer workspace;             // of the CPU
  std::unique_ptr<dispatch::GpuCache> gpu;  // null on the CPU

  /// The page table as the layers see it: what has been begun, not what has been planned since. A
  /// GPU's is in its own memory.
  std::unique_ptr<std::int32_t[]> begun_table;  // [max_num_seqs, max_pages_per_seq]
  StepPlan begun;

  /// The storage of a layer that is in range.
  [[nodiscard]] kernels::KvPages pages_of_layer(std::int32_t layer) const;
  [[nodiscard]] dispatch::GpuStorage gpu_storage() const;
  /// The begun step over this cache, in memory of its device.
  [[nodiscard]] kernels::StepBatch begun_batch() const;
  /// The same with lengths in host memory; without a page table on a GPU.
  [[nodiscard]] kernels::StepBatch begun_host_batch() const;
};

}  // namespace octavo::detail
