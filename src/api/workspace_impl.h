// SPDX-License-Identifier: Apache-2.0
// What is behind a Workspace, and the calls over a caller's cache in a GPU's memory.
#pragma once

#include <octavo/workspace.h>

#include <cstddef>
#include <memory>

#include "dispatch/gpu.h"

namespace octavo::detail {

struct WorkspaceImpl {
  Device device;
  std::unique_ptr<dispatch::GpuWorkspace> gpu;
  std::size_t num_bytes = 0;  ///< Of the memory that it uses.
};

}  // namespace octavo::detail

namespace octavo::api {

/// What an attention call was given, for as long as it lasts.
struct GpuAttend {
  const AttentionConfig& config;
  const KvView& cache;
  const StepArrays& step;
  const LayerInputs& inputs;
  const TensorView& out;
  const TensorView* lse;
  Stream stream;
};

/// As the public functions, for configurations with their defaults filled in and caches that say
/// they are a GPU's.
void attend_on_gpu(const GpuAttend& given);
void check_attend_on_gpu(const GpuAttend& given);
void append_on_gpu(const AttentionConfig& config, const KvView& cache, const StepArrays& step,
                   const LayerInputs& inputs, Stream stream);

}  // namespace octavo::api
