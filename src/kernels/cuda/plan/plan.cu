// SPDX-License-Identifier: Apache-2.0
// Plan. One launch, bound by the latency of three dependent loads (length and row, page-table
// entries, the writes). Some threads look at a sequence's pages, enough for its table row; every
// block looks at all offsets for itself, so that none waits for another.
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/step.cuh"
#include "kernels/cuda/plan/plan.h"

namespace octavo::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostSequences = kThreads / static_cast<int>(kWarp);  // of a block
constexpr int kNone = 0x7FFFFFFF;

/// The first broken rule of the offsets goes to `first` (in shared memory), by its batch row.
__device__ void check_offsets(const CallersStep& step, int& first) {
  const std::int32_t* offsets = step.batch.token_offsets;
  for (int b = static_cast<int>(threadIdx.x); b < step.batch.num_seqs; b += kThreads) {
    if (offset_fault(step, b, offsets[b], offsets[b + 1]).kind != Fault::None) atomicMin(&first, b);
  }
}

/// The first of a row's entries that names no page, among those that this thread looks at; rows may
/// begin anywhere, so their middle alone is read in vectors.
__device__ int first_bad_entry(const CallersStep& step, const std::int32_t* pages,
                               std::int32_t num_pages, int lane, int threads) {
  constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(std::int32_t));
  const auto skew = static_cast<int>(reinterpret_cast<std::uintptr_t>(pages) % kVectorBytes /
                                     sizeof(std::int32_t));
  const std::int32_t head = min((kVector - skew) % kVector, num_pages);
  const std::int32_t vectors = (num_pages - head) / kVector;
  int first = kNone;
  const auto look = [&](std::int32_t entry, std::int32_t page) {
    if (!is_page(step, page)) first = min(first, entry);
  };
#pragma unroll 4
  for (std::int32_t i = lane; i < vectors; i += threads) {
    const int4 read = reinterpret_cast<const int4*>(pages + head)[i];
    const std::int32_t entry = head + i * kVector;
    look(entry, read.x);
    look(entry + 1, read.y);
    look(entry + 2, read.z);
    look(entry + 3, read.w);
  }
  const std::int32_t tail = head + vectors * kVector + lane;
  if (lane < head) look(lane, pages[lane]);
  if (tail < num_pages) look(tail, pages[tail]);
  return first;
}

struct PlannedSequence {
  std::int32_t b = 0;
  std::int32_t kv_len = 0;  // 0: nothing is written
  std::int32_t row = 0;
  const std::int32_t* pages = nullptr;  // null: the row is the page
};

/// The slots of a sequence's new tokens, by `threads` threads.
__device__ void write_tokens(const CallersStep& step, const PlannedStep& to,
                             const PlannedSequence& sequence, int lane, int threads) {
  const std::int32_t begin = step.batch.token_offsets[sequence.b];
  const std::int32_t num_new = step.batch.token_offsets[sequence.b + 1] - begin;
#pragma unroll 4
  for (std::int32_t i = lane; i < num_new; i += threads) {
    TokenSlot slot = slot_without_page(step, sequence.kv_len, num_new, i);
    if (slot.page >= 0) {
      slot.page =
          sequence.pages == nullptr ? sequence.row : sequence.pages[slot.position / step.page_size];
    }
    to.token_slots[begin + i] = slot;
    to.token_indices[begin + i] = {sequence.b, i};
  }
}

__global__ void __launch_bounds__(kThreads)
    plan_step_kernel(const __grid_constant__ CallersStep step,
                     const __grid_constant__ PlannedStep to, int threads_per_seq) {
  __shared__ int first_bad_offset;
  __shared__ int first_bad_page[kMostSequences];
  const auto thread = static_cast<int>(threadIdx.x);
  const int in_block = thread / threads_per_seq;
  const int lane = thread % threads_per_seq;
  const std::int32_t n = step.batch.num_seqs;
  const std::int32_t b =
      static_cast<std::int32_t>(blockIdx.x) * (kThreads / threads_per_seq) + in_block;
  const bool is_seq = b < n;
  if (thread == 0) first_bad_offset = kNone;
  if (lane == 0) first_bad_page[in_block] = kNone;
  const std::int32_t kv_len = is_seq ? step.batch.kv_lens[b] : 0;
  const std::int32_t row = is_seq && step.batch.rows != nullptr ? step.batch.rows[b] : b;
  __syncthreads();
  check_offsets(step, first_bad_offset);

  PlanFault fault = length_fault(step, kv_len, row);
  const std::int32_t* pages = nullptr;
  if (step.batch.page_table != nullptr && fault.kind == Fault::None && kv_len > 0) {
    pages = step.batch.page_table + std::int64_t{row} * step.batch.page_table_stride;
    const std::int32_t num_pages = (kv_len - 1) / step.page_size + 1;
    const int first = first_bad_entry(step, pages, num_pages, lane, threads_per_seq);
    if (first != kNone) atomicMin(&first_bad_page[in_block], first);
  }
  __syncthreads();

  const bool has_tokens = first_bad_offset == kNone;
  if (blockIdx.x == 0 && thread == 0) {
    to.token_offsets[0] = 0;
    PlanFault whole;
    if (!has_tokens) {
      const int at = first_bad_offset;
      whole =
          offset_fault(step, at, step.batch.token_offsets[at], step.batch.token_offsets[at + 1]);
    }
    to.faults[n] = whole;
  }
  if (!is_seq) return;
  const int bad_page = first_bad_page[in_block];
  if (bad_page != kNone) fault = {Fault::Page, bad_page, pages[bad_page]};
  const bool good = has_tokens && fault.kind == Fault::None && kv_len > 0;
  if (has_tokens) write_tokens(step, to, {b, good ? kv_len : 0, row, pages}, lane, threads_per_seq);
  if (lane != 0) return;
  to.token_offsets[b + 1] = has_tokens ? step.batch.token_offsets[b + 1] : 0;
  to.kv_lens[b] = good ? kv_len : 0;
  to.rows[b] = good ? row : 0;
  to.faults[b] = fault;
}

/// Threads of a sequence, from a warp to the block: for the longest row 8 entries a thread, and as
/// many tokens where there are few sequences.
int threads_for(const CallersStep& step) {
  constexpr std::int64_t kEach = 8;
  constexpr std::int64_t kFewSequences = 512;
  const std::int64_t entries =
      step.batch.page_table == nullptr ? 0 : step.maxima.max_kv_len / step.page_size + 1;
  const std::int64_t tokens = step.batch.num_seqs <= kFewSequences ? step.maxima.max_new_tokens : 0;
  int threads = static_cast<int>(kWarp);
  while (threads < kThreads && threads * kEach < max(entries, tokens)) threads *= 2;
  return threads;
}

}  // namespace

int plan_step(const CallersStep& step, const PlannedStep& to, CUstream_st* stream) {
  const int threads = threads_for(step);
  plan_step_kernel<<<grid_for(max(step.batch.num_seqs, 1), kThreads / threads), kThreads, 0,
                     stream>>>(step, to, threads);
  return launched();
}

}  // namespace octavo::kernels::cuda
