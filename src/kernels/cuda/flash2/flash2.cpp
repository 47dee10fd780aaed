// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/flash2/flash2.h"

#include <algorithm>
#include <limits>
#include <numbers>
#include <type_traits>

#include "base/error.h"
#include "device/gpu.h"
#include "kernels/cuda/common/frequencies.h"
#include "kernels/cuda/flash2/row_steps.h"
#include "kernels/cuda/flash2/work.h"

namespace octavo::kernels::flash2 {
namespace {

using device::check;

constexpr int kMostPairs = kWidestHead / 2;
static_assert(std::is_trivially_copyable_v<Work> &&
                  sizeof(Work) + sizeof(FrequencyTable<kMostPairs>) <= 4096,
              "kernel parameters are at most 4 KB");

constexpr std::size_t kAlignment = 256;

/// Rows of the tiles that a call's instance must do for. In batch-invariant mode that must not
/// depend on who else is in the batch.
std::int64_t rows_wanted(const AttendParams& p, const StepMaxima& maxima) {
  constexpr std::int64_t kAny = kMostFewRows + 1;
  if (p.batch_invariant || !step_streams(maxima, p.num_kv_heads)) return kAny;
  return std::int64_t{maxima.max_new_tokens} * (p.num_q_heads / p.num_kv_heads);
}

/// What the host makes of a call.
struct Call {
  Call(const AttendParams& params, const StepLengths& lengths, std::int32_t num_multiprocessors,
       std::size_t block_smem_bytes)
      : maxima(maxima_of(lengths)),
        instance(instance_of(std::max(params.head_dim, params.head_dim_v),
                             rows_wanted(params, maxima), block_smem_bytes)),
        tiling(tiling_of(params.num_q_heads, params.num_kv_heads, instance.rows)),
        shape(cut_shape(params, instance, maxima)),
        bounds(cut_bounds(shape, maxima, std::min(num_multiprocessors * instance.blocks, kMaxSlots),
                          tiling.heads)) {
    if (!lengths.bounded && bounds.num_items > 0) count_items(lengths.batch);
    const std::int64_t item_rows = bounds.num_partial_rows * params.num_q_heads;
    const std::int64_t rows =
        item_rows + slot_partial_rows(bounds, std::max(params.head_dim, params.head_dim_v),
                                      num_multiprocessors, block_smem_bytes);
    if (bounds.num_items > 0) {
      const std::int64_t num_seqs = maxima.num_seqs;
      item_offsets = take(num_seqs + 1, sizeof(std::int64_t));
      partial_offsets = take(num_seqs + 1, sizeof(std::int64_t));
      split_tiles = take(num_seqs, sizeof(std::int32_t));
      num_splits = take(num_seqs, sizeof(std::int32_t));
      slots = take(1, sizeof(Slots));
    }
    stats = take(rows, sizeof(RowStats));
    partials = take(rows * instance.dim, sizeof(float));
    slot_partials = item_rows;
  }

  StepMaxima maxima;
  Instance instance;
  Tiling tiling;
  CutShape shape;
  CutBounds bounds;
  /// Bytes in the workspace.
  std::size_t item_offsets = 0, partial_offsets = 0, split_tiles = 0, num_splits = 0, slots = 0;
  std::size_t stats = 0, partials = 0;
  std::size_t end = 0;
  std::int64_t slot_partials = 0;

 private:
  /// What the lengths make, in place of what maxima might.
  void count_items(const StepBatch& batch) {
    const auto new_tokens = [&](std::int32_t b) {
      return batch.token_offsets[b + 1] - batch.token_offsets[b];
    };
    std::int64_t work = 0;
    for (std::int32_t b = 0; b < batch.num_seqs; ++b)
      work += flash2::work_of(shape, new_tokens(b), batch.kv_lens[b]);
    const std::int64_t run = run_length(shape, work);
    bounds.num_items = bounds.num_partial_rows = 0;
    for (std::int32_t b = 0; b < batch.num_seqs; ++b) {
      const Cut cut = cut_of(shape, new_tokens(b), batch.kv_lens[b], run);
      bounds.num_items += cut.num_items;
      bounds.num_partial_rows += cut.num_partial_rows;
    }
  }

  std::size_t take(std::int64_t count, std::size_t size) {
    const std::size_t at = end;
    end += (static_cast<std::size_t>(count) * size + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
};

/// Whether address and strides (elements of `size` bytes) are multiples of `bytes`.
template <typename... StridesT>
bool is_multiple(std::uintptr_t bytes, const void* data, std::int64_t size, StridesT... strides) {
  const auto fits = [&](std::int64_t stride) {
    return stride * size % static_cast<std::int64_t>(bytes) == 0;
  };
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 && (... && fits(strides));
}
bool is_multiple(std::uintptr_t bytes, const void* data, std::int64_t size,
                 const TokenLayout& layout) {
  return is_multiple(bytes, data, size, layout.batch_stride, layout.token_stride,
                     layout.head_stride);
}

/// The feature table keeps away what 32 bits cannot say.
void set_row_steps(const KvPages& kv, Work& work) {
  OCTAVO_ASSERT(has_near_rows(kv));
  const std::int64_t unit = row_unit_of(kv);
  const auto steps = [&](const PagedTensor& tensor) {
    return RowSteps{static_cast<std::int32_t>(tensor.page_stride * kElementBytes / unit),
                    static_cast<std::int32_t>(tensor.slot_stride * kElementBytes / unit)};
  };
  work.row_unit = static_cast<std::int32_t>(unit);
  work.k_steps = steps(kv.k);
  work.v_steps = steps(kv.v);
}

Work work_of(const AttendParams& params, const Call& call, std::byte* workspace,
             std::byte* arrived) {
  const auto longs = [&](std::size_t place) {
    return reinterpret_cast<std::int64_t*>(workspace + place);
  };
  const auto ints = [&](std::size_t place) {
    return reinterpret_cast<std::int32_t*>(workspace + place);
  };
  Work work;
  work.attend = params;
  work.tiling = call.tiling;
  work.shape = call.shape;
  work.cut = {.item_offsets = longs(call.item_offsets),
              .partial_offsets = longs(call.partial_offsets),
              .split_tiles = ints(call.split_tiles),
              .num_splits = ints(call.num_splits),
              .slots = reinterpret_cast<Slots*>(workspace + call.slots)};
  work.dim = call.instance.dim;
  work.tile_rows = call.instance.rows;
  work.max_items = call.bounds.num_items;
  work.max_slots = call.bounds.num_slots;
  work.slot_rows = call.bounds.slot_rows;
  work.partials = reinterpret_cast<float*>(workspace + call.partials);
  work.stats = reinterpret_cast<RowStats*>(workspace + call.stats);
  work.slot_partials = call.slot_partials;
  work.arrived = reinterpret_cast<std::uint32_t*>(arrived);
  work.q_in_vectors = is_multiple(16, params.q, 2, params.q_layout);
  work.out_in_vectors =
      params.out_dtype == params.kv.dtype && is_multiple(16, params.out, 2, params.out_layout);
  constexpr std::int32_t kMostTogether = 16;  // keys of a warp's load
  work.rows_together =
      params.batch.page_table == nullptr || params.kv.page_size % kMostTogether == 0;
  set_row_steps(params.kv, work);
  work.num_pages = static_cast<std::int32_t>(
      std::min<std::int64_t>(params.kv.num_pages, std::numeric_limits<std::int32_t>::max()));
  if (work.max_slots > 0)
    work.by_most_slots = divider_of(static_cast<std::uint32_t>(work.max_slots));
  const float scale = params.scale * std::numbers::log2e_v<float>;
  work.plain_logits =
      params.softcap <= 0.0F && params.alibi_slopes == nullptr && params.scale > 0.0F;
  work.logit_factor = work.plain_logits ? scale : 1.0F;
  if (params.softcap > 0.0F) work.cap_factor = 2.0F * scale / params.softcap;
  work.by_page = divider_of(static_cast<std::uint32_t>(params.kv.page_size));
  work.by_heads = divider_of(static_cast<std::uint32_t>(call.tiling.heads));
  work.by_last_heads = divider_of(static_cast<std::uint32_t>(
      call.tiling.group - (call.tiling.tiles_per_group - 1) * call.tiling.heads));
  return work;
}

/// Whether the output, or the LSE, may have rows of no token.
bool may_have_padding(const AttendParams& p, const StepLengths& lengths) {
  if (lengths.bounded || !p.out_layout.ragged) return true;
  const std::int64_t tokens = lengths.batch.num_tokens;
  return p.out_layout.num_token_rows > tokens || (p.lse != nullptr && p.num_lse_rows > tokens);
}

using AttendInstance = int (*)(const Work&, const Frequencies&, CUstream_st*);
AttendInstance kernel_of(const Instance& instance) {
  if (instance.dim == Head64::kDim) return instance.few ? attend_few_64 : attend_64;
  if (instance.dim == Head128::kDim) return instance.few ? attend_few_128 : attend_128;
  if (instance.dim == Head256::kDim) {
    if (instance.few) return attend_few_256;
    return instance.room == Room::Full ? attend_256 : attend_256_small;
  }
  if (instance.room == Room::Full) return attend_wide;
  return instance.room == Room::Medium ? attend_wide_medium : attend_wide_small;
}

}  // namespace

Flash2::Flash2(Device device, std::size_t block_smem_bytes)
    : num_multiprocessors_(device::require_gpu(device, "device").num_multiprocessors),
      block_smem_bytes_(block_smem_bytes),
      arrived_(device, kMaxSlots * sizeof(std::uint32_t), device::GpuBuffer::Fill::Zero,
               "flash2's counters") {}

std::size_t Flash2::workspace_bytes(const AttendParams& params, const StepLengths& lengths) const {
  return Call(params, lengths, num_multiprocessors_, block_smem_bytes_).end;
}

void Flash2::attend(const AttendParams& params, const StepLengths& lengths, void* workspace,
                    CUstream_st* stream) const {
  if (may_have_padding(params, lengths)) check(pad_rows(params, stream), "pad_rows");
  const Call call(params, lengths, num_multiprocessors_, block_smem_bytes_);
  const CutBounds& bounds = call.bounds;
  if (bounds.num_items == 0 && bounds.num_slots == 0) return;
  const Work work = work_of(params, call, static_cast<std::byte*>(workspace), arrived_.data());
  if (bounds.num_items > 0) check(cut_step(work, stream), "cut_step");
  FrequencyTable<kMostPairs> frequencies{};
  cuda::fill_frequencies(params.rope, frequencies.values);
  check(kernel_of(call.instance)(work, {frequencies.values}, stream), "attend");
  if (bounds.num_partial_rows > 0) check(combine_partials(work, stream), "combine_partials");
}

std::size_t workspace_bytes_on(Device device, std::size_t block_smem_bytes,
                               const AttendParams& params, const StepLengths& lengths) {
  const device::Gpu& gpu = device::require_gpu(device, "device");
  return Call(params, lengths, gpu.num_multiprocessors, block_smem_bytes).end;
}

}  // namespace octavo::kernels::flash2
