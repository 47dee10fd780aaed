// SPDX-License-Identifier: Apache-2.0
// Tokens from format to format, and pages to contiguous rows, on the GPU.
#pragma once

#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::cuda {

/// Both return a cudaError_t. Pointers are the device's; any strides, any of F32, F16, BF16.
int convert_tokens(const ConvertParams& params, CUstream_st* stream);
int gather_pages(const GatherParams& params, CUstream_st* stream);

}  // namespace octavo::kernels::cuda
