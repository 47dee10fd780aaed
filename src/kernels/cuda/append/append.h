// SPDX-License-Identifier: Apache-2.0
// Append on the GPU: new K and V into their slots, K rotated when asked.
#pragma once

#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::cuda {

/// Writes the step's new K and V in the cache's dtype, K rotated when rope.rotary_dim > 0, then
/// clears batch.clear_lens[b] slots behind each sequence's new end. Pointers are the device's.
/// batch.num_seqs and num_tokens may be maxima: tokens beyond batch.token_offsets[num_seqs] write
/// nothing, and no slot outside the pool is written. Returns a cudaError_t.
int append(const AppendParams& params, CUstream_st* stream);

}  // namespace octavo::kernels::cuda
