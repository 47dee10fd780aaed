// SPDX-License-Identifier: Apache-2.0
// What the kernels of flash2 are told, and what starts them. Compiles without CUDA; each function
// returns a cudaError_t.
#pragma once

#include <cstdint>

#include "kernels/cuda/flash2/rules.h"
#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::flash2 {

/// base^(-2i / rotary_dim) of each pair.
struct Frequencies {
  double values[128];  ///< Half of the widest head here.
};

/// The step's cut, in device memory.
struct CutArrays {
  std::int64_t* item_offsets = nullptr;     ///< [num_seqs + 1]
  std::int64_t* partial_offsets = nullptr;  ///< [num_seqs + 1]
  std::int32_t* split_tiles = nullptr;      ///< [num_seqs]
  std::int32_t* num_splits = nullptr;       ///< [num_seqs]
};

/// Of a row's keys so far: the largest logit and the sum of 2^(logit - largest), logits in units of
/// log2(e).
struct RowStats {
  float max;
  float sum;
};

struct Work {
  AttendParams attend;
  Tiling tiling;
  CutShape shape;
  CutArrays cut;
  std::int32_t dim = 0;        ///< The instance's: 64, 128 or 256; partials have rows of it.
  float* partials = nullptr;   ///< [num_partial_rows, num_q_heads, dim], not yet divided.
  RowStats* stats = nullptr;   ///< [num_partial_rows, num_q_heads]
  bool q_in_vectors = false;   ///< 16 bytes of q may be read at once.
  bool out_in_pairs = false;   ///< Two elements of out may be written at once.
  std::int64_t max_items = 0;  ///< Bounds of the grid.
};

/// Fills the cut from the lengths in device memory.
int cut_step(const Work& work, CUstream_st* stream);

/// The attention of all items of an instance, by the cache's dtype.
int attend_64(const Work& work, const Frequencies& frequencies, CUstream_st* stream);
int attend_128(const Work& work, const Frequencies& frequencies, CUstream_st* stream);
int attend_256(const Work& work, const Frequencies& frequencies, CUstream_st* stream);

/// Partials to outputs, in the order of the splits.
int combine_partials(const Work& work, CUstream_st* stream);

/// Padding rows of the output become 0, of the LSE -inf.
int pad_rows(const AttendParams& params, CUstream_st* stream);

}  // namespace octavo::kernels::flash2
