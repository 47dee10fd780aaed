// SPDX-License-Identifier: Apache-2.0
// Reads StepLengths, on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/params.h"

namespace octavo::kernels {

/// The maxima that are known, or those of the step's own lengths.
inline StepMaxima maxima_of(const StepLengths& lengths) {
  if (lengths.bounded) return lengths.maxima;
  const StepBatch& batch = lengths.batch;
  StepMaxima maxima{.num_seqs = batch.num_seqs, .num_tokens = batch.num_tokens};
  for (std::int32_t b = 0; b < batch.num_seqs; ++b) {
    maxima.max_new_tokens =
        std::max(maxima.max_new_tokens, batch.token_offsets[b + 1] - batch.token_offsets[b]);
    maxima.max_kv_len = std::max(maxima.max_kv_len, batch.kv_lens[b]);
  }
  return maxima;
}

}  // namespace octavo::kernels
