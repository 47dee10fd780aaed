// SPDX-License-Identifier: Apache-2.0
// The own kernels of unfused, between its products. Each returns a cudaError_t.
#pragma once

#include "kernels/cuda/unfused/chunks.h"
#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::cuda {

/// A chunk at work: what the caller asked for, and the arrays in the workspace.
struct UnfusedRows {
  AttendParams attend;
  UnfusedChunk chunk;
  std::int32_t group = 1;
  std::int32_t padded_dim = 0;
  std::int32_t padded_dim_v = 0;
  DType dtype = DType::F32;  ///< Of q, K, V and weights in the workspace.
  void* q = nullptr;
  float* scores = nullptr;  ///< Weights take the beginning of the row of scores that they are of.
  const float* out = nullptr;
  float* factors = nullptr;
};

/// q of the chunk's tokens, rotated when asked, to [seqs, heads, tokens * group, padded_dim].
int gather_queries(const UnfusedRows& rows, CUstream_st* stream);

/// weights = exp(logit - max) where a key is seen and 0 elsewhere, factors = what the products with
/// V are to be multiplied with, LSE where it is wanted.
int softmax_rows(const UnfusedRows& rows, CUstream_st* stream);

/// The products with V, multiplied and converted, to the caller's output.
int write_rows(const UnfusedRows& rows, CUstream_st* stream);

/// Padding rows of the output become 0, of the LSE -inf.
int pad_outputs(const AttendParams& params, CUstream_st* stream);

}  // namespace octavo::kernels::cuda
