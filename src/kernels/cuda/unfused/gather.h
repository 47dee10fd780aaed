// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::cuda {

/// Pages to contiguous rows; a cudaError_t.
int gather_keys(const GatherParams& params, CUstream_st* stream);

}  // namespace octavo::kernels::cuda
