// SPDX-License-Identifier: Apache-2.0
// Checks of a cache that the caller manages, shared by attention over it and by gathering from it.
#pragma once

#include <octavo/attention.h>

#include "kernels/params.h"

namespace octavo::api {

/// Shapes, dtypes and device of the caller's pages. Throws InvalidArgument.
kernels::KvPages checked_pages(const AttentionConfig& config, const KvView& cache, bool writable,
                               Device device);

/// Lengths, rows and page ids in host memory, each of them looked at; token_offsets are not used.
kernels::StepBatch checked_lengths(const KvView& cache, const StepArrays& step);

/// The same in device memory, where only the pointers can be looked at.
kernels::StepBatch device_lengths(const KvView& cache, const StepArrays& step);

}  // namespace octavo::api
