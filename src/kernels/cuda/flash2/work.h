// SPDX-License-Identifier: Apache-2.0
// What the kernels of flash2 are told, and what starts them. Compiles without CUDA; each function
// returns a cudaError_t.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/flash2/rules.h"
#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::flash2 {

/// base^(-2i / rotary_dim) of each pair, and a copy for the pairs that an instance may have.
struct Frequencies {
  const double* values = nullptr;
};
template <std::size_t kPairs>
struct FrequencyTable {
  double values[kPairs];
};

/// The items of a step, in device memory; streamed sequences have none.
struct CutArrays {
  std::int64_t* item_offsets = nullptr;     ///< [num_seqs + 1]
  std::int64_t* partial_offsets = nullptr;  ///< [num_seqs + 1]
  std::int32_t* split_tiles = nullptr;      ///< [num_seqs]
  std::int32_t* num_splits = nullptr;       ///< [num_seqs]
  Slots* slots = nullptr;                   ///< One: the streamed sequences' beside the items.
};

/// Of a row's keys so far, with logits in units of log2(e): a base near the largest logit, and sums
/// of the weights 2^(logit - base).
struct alignas(16) RowStats {
  float base = 0.0F;
  float sum = 0.0F;    ///< Of the weights as they were rounded: outputs are divided by it.
  float exact = 0.0F;  ///< Of the weights before; the LSE's. Not set where none is asked for.
};

/// Steps in K or V from page to page and from slot to slot, in units of a power of two of bytes, so
/// that where a row lies is one number of 32 bits.
struct RowSteps {
  std::int32_t page = 0;
  std::int32_t slot = 0;
};

struct Work {
  AttendParams attend;
  Tiling tiling;
  CutShape shape;
  CutArrays cut;
  std::int32_t dim = 0;              ///< The instance's; partials have rows of it.
  std::int32_t tile_rows = 0;        ///< The instance's.
  std::int64_t max_items = 0;        ///< Bounds of the grid: items of a head tile,
  std::int32_t max_slots = 0;        ///< and slots.
  std::int64_t slot_rows = 0;        ///< Of a slot's partial result.
  float* partials = nullptr;         ///< [.., dim], not yet divided: of items, then of slots.
  RowStats* stats = nullptr;         ///< One for each row of partials.
  std::int64_t slot_partials = 0;    ///< The first row of partials of slots.
  std::uint32_t* arrived = nullptr;  ///< [max_slots] Parts that are there; 0 between calls.
  bool q_in_vectors = false;         ///< 16 bytes of q may be read at once.
  bool out_in_vectors = false;       ///< 16 bytes of out may be written at once.
  bool rows_together = false;        ///< Sixteen keys from a multiple of 16 on lie in one page.
  std::int32_t num_pages = 0;        ///< Of the pool, as far as 32-bit ids go.
  std::int32_t row_unit = 16;        ///< Bytes, of k_steps and v_steps.
  RowSteps k_steps, v_steps;
  /// Whether nothing but a positive scale is asked for: products stay as they are until their
  /// exponentials are taken, whose argument is product * logit_factor. Otherwise that is 1.
  bool plain_logits = true;
  float logit_factor = 1.0F;
  float cap_factor = 0.0F;  ///< Products to twice the argument of softcap's tanh, times log2(e).
  Divider by_most_slots;    ///< By max_slots.
  Divider by_page;          ///< By the slots of a page.
  Divider by_heads;         ///< By the heads of a tile,
  Divider by_last_heads;    ///< and of the last tile of a group.
};

/// Fills the cut from the lengths in device memory.
int cut_step(const Work& work, CUstream_st* stream);

/// The attention of an instance, by the cache's dtype.
int attend_64(const Work& work, const Frequencies& frequencies, CUstream_st* stream);
int attend_128(const Work& work, const Frequencies& frequencies, CUstream_st* stream);
int attend_256(const Work& work, const Frequencies& frequencies, CUstream_st* stream);
int attend_256_small(const Work& work, const Frequencies& frequencies, CUstream_st* stream);
int attend_few_64(const Work& work, const Frequencies& frequencies, CUstream_st* stream);
int attend_few_128(const Work& work, const Frequencies& frequencies, CUstream_st* stream);
int attend_few_256(const Work& work, const Frequencies& frequencies, CUstream_st* stream);
int attend_wide(const Work& work, const Frequencies& frequencies, CUstream_st* stream);
int attend_wide_medium(const Work& work, const Frequencies& frequencies, CUstream_st* stream);
int attend_wide_small(const Work& work, const Frequencies& frequencies, CUstream_st* stream);

/// Partials of items to outputs, in the order of the splits.
int combine_partials(const Work& work, CUstream_st* stream);

/// Padding rows of the output become 0, of the LSE -inf.
int pad_rows(const AttendParams& params, CUstream_st* stream);

}  // namespace octavo::kernels::flash2
