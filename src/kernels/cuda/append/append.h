// SPDX-License-Identifier: Apache-2.0
// Append on the GPU: new K and V into their slots, K rotated when asked.
#pragma once

#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::cuda {

/// Whether append, on the current device, may be launched before the work ahead of it on the stream
/// has ended: its code for sm90 and up waits for it. Asks the runtime; a cache asks once.
bool append_may_overlap();

/// Writes the step's new K and V in the cache's dtype, K rotated when rope.rotary_dim > 0, then
/// clears the slots behind each sequence's new end, all as batch.token_slots say. Pointers are the
/// device's. batch.num_seqs and num_tokens may be maxima: tokens beyond
/// batch.token_offsets[num_seqs] write nothing, and no slot outside the pool is written.
/// `overlaps`: append_may_overlap(). Returns a cudaError_t.
int append(const AppendParams& params, bool overlaps, CUstream_st* stream);

}  // namespace octavo::kernels::cuda
