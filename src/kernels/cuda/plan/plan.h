// SPDX-License-Identifier: Apache-2.0
// The planning kernel: checks the arrays of a caller who manages his own cache and writes the step
// that the layers use; and what finds single tokens in his lists of pages. Compiles without CUDA.
#pragma once

#include "kernels/cuda/plan/rules.h"
#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::cuda {

/// Returns a cudaError_t.
int plan_step(const CallersStep& step, const PlannedStep& to, CUstream_st* stream);

/// Where tokens lie whose sequences' pages are in one list. Returns a cudaError_t.
int locate_tokens(const ListedParams& params, CUstream_st* stream);

}  // namespace octavo::kernels::cuda
