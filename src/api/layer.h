// SPDX-License-Identifier: Apache-2.0
// A validated layer call: the part that attention over our own cache and over the caller's have in
// common.
#pragma once

#include <octavo/attention.h>

#include "api/tensors.h"
#include "dispatch/features.h"
#include "kernels/params.h"

namespace octavo::api {

/// A step in memory of the device and, for the checks, in the host's. On the CPU both are one; of a
/// bounded step the host's has no lengths.
struct StepBatches {
  kernels::StepBatch device;
  kernels::StepBatch host;
};

/// Checks k, v and RoPE. Throws InvalidArgument.
kernels::AppendParams append_params(const AttentionConfig& config, const LayerInputs& inputs,
                                    const StepShape& shape, const StepBatches& batches,
                                    const kernels::KvPages& pages);

/// Checks q, out, lse and RoPE. Throws InvalidArgument.
kernels::AttendParams attend_params(const AttentionConfig& config, const LayerInputs& inputs,
                                    const StepShape& shape, const StepBatches& batches,
                                    const kernels::KvPages& pages, const TensorView& out,
                                    const TensorView* lse);

/// Whether every head of every slot of K and V begins at a multiple of 16 bytes.
bool has_aligned_rows(const kernels::KvPages& pages);

/// What the call asks of a backend.
dispatch::Request attend_request(const AttentionConfig& config, const kernels::AttendParams& params,
                                 const StepShape& shape);

/// What a step within the maxima may not exceed. Throws InvalidArgument naming the maximum.
void check_within(const StepPlan& plan, const StepMaxima& maxima);
/// Throws InvalidArgument for maxima that no step has.
void check_maxima(const StepMaxima& maxima);

}  // namespace octavo::api
