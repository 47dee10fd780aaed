// SPDX-License-Identifier: Apache-2.0
// What makes a step over a caller's cache a good one: the same rules for the planning kernel and
// for a host that repeats it (tests). Compiles without CUDA.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace octavo::kernels::cuda {

enum class Fault : std::int32_t {
  None,
  FirstOffset,    ///< Is not 0.
  FallingOffset,  ///< At `index`.
  NewTokens,      ///< Of sequence `index`: more than the maximum.
  NumTokens,      ///< Of the step: more than the maximum.
  Row,            ///< Outside the table.
  Length,         ///< Negative, beyond the row, or more than the maximum.
  Page,           ///< Entry `index` of the sequence's row is outside the pool.
};

/// One for each sequence, and one more for what is wrong with the step as a whole.
struct PlanFault {
  Fault kind = Fault::None;
  std::int32_t index = 0;
  std::int32_t value = 0;

  friend bool operator==(const PlanFault&, const PlanFault&) = default;
};

/// The planned step, in device memory. Sequences that break a rule have length 0, so that they
/// write nothing and see no key; a step whose offsets break one has no tokens at all.
struct PlannedStep {
  std::int32_t* token_offsets = nullptr;  ///< [num_seqs + 1]
  std::int32_t* kv_lens = nullptr;        ///< [num_seqs]
  std::int32_t* rows = nullptr;           ///< [num_seqs]
  PlanFault* faults = nullptr;            ///< [num_seqs + 1]
  TokenSlot* token_slots = nullptr;       ///< [maxima.num_tokens], those of the step are written
  TokenIndex* token_indices = nullptr;    ///< Likewise.
};

/// What is wrong with offsets b and b + 1; b < num_seqs.
constexpr PlanFault offset_fault(const CallersStep& step, std::int32_t b, std::int32_t begin,
                                 std::int32_t end) {
  if (b == 0 && begin != 0) return {Fault::FirstOffset, 0, begin};
  if (end < begin) return {Fault::FallingOffset, b + 1, end};
  const std::int64_t count = std::int64_t{end} - begin;
  if (count > step.maxima.max_new_tokens) {
    constexpr std::int64_t kMost = 0x7FFFFFFF;
    return {Fault::NewTokens, b, static_cast<std::int32_t>(count < kMost ? count : kMost)};
  }
  if (end > step.maxima.num_tokens) return {Fault::NumTokens, b + 1, end};
  return {};
}

/// What is wrong with a sequence, its pages apart. A sequence without keys needs no row.
constexpr PlanFault length_fault(const CallersStep& step, std::int32_t kv_len, std::int32_t row) {
  if (kv_len < 0 || kv_len > step.max_slots || kv_len > step.maxima.max_kv_len)
    return {Fault::Length, 0, kv_len};
  if (kv_len > 0 && (row < 0 || row >= step.num_rows)) return {Fault::Row, 0, row};
  return {};
}

/// Where new token `i` of `num_new` goes, but for its page: nowhere when the new tokens are more
/// than the sequence.
constexpr TokenSlot slot_without_page(const CallersStep& step, std::int32_t kv_len,
                                      std::int32_t num_new, std::int32_t i) {
  const std::int32_t position = kv_len - num_new + i;
  if (position < 0) return {};
  return {0, position % step.page_size, position, 0};
}

constexpr bool is_page(const CallersStep& step, std::int32_t page) {
  return page >= 0 && page < step.num_pages;
}

}  // namespace octavo::kernels::cuda
