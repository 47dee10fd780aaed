// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/flash2/flash2.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "device/gpu.h"
#include "kernels/cuda/flash2/work.h"

namespace octavo::kernels::flash2 {
namespace {

using device::check;

static_assert(std::is_trivially_copyable_v<Work> && sizeof(Work) + sizeof(Frequencies) <= 4096,
              "kernel parameters are at most 4 KB");

constexpr std::size_t kAlignment = 256;

std::int32_t instance_of(const AttendParams& p) {
  const std::int32_t dim = std::max(p.head_dim, p.head_dim_v);
  return dim <= 64 ? 64 : dim <= 128 ? 128 : kWidestHead;
}

std::int32_t num_seqs_of(const StepLengths& lengths) {
  return lengths.bounded ? lengths.maxima.num_seqs : lengths.batch.num_seqs;
}

CutBounds bounds_of(const CutShape& shape, const StepLengths& lengths) {
  if (lengths.bounded) {
    const StepMaxima& maxima = lengths.maxima;
    return cut_bounds(shape, maxima.num_seqs, maxima.num_tokens, maxima.max_kv_len);
  }
  std::int32_t longest = 0;
  for (std::int32_t b = 0; b < lengths.batch.num_seqs; ++b)
    longest = std::max(longest, lengths.batch.kv_lens[b]);
  return cut_bounds(shape, lengths.batch.num_seqs, lengths.batch.num_tokens, longest);
}

/// Where the arrays of a call lie in the workspace, in bytes.
struct Places {
  Places(const AttendParams& p, const StepLengths& lengths, const CutBounds& bounds) {
    const auto take = [&](std::int64_t count, std::size_t size) {
      const std::size_t at = end;
      const std::size_t bytes = static_cast<std::size_t>(count) * size;
      end += (bytes + kAlignment - 1) / kAlignment * kAlignment;
      return at;
    };
    const std::int64_t num_seqs = num_seqs_of(lengths);
    const std::int64_t rows = bounds.num_partial_rows * p.num_q_heads;
    item_offsets = take(num_seqs + 1, sizeof(std::int64_t));
    partial_offsets = take(num_seqs + 1, sizeof(std::int64_t));
    split_tiles = take(num_seqs, sizeof(std::int32_t));
    num_splits = take(num_seqs, sizeof(std::int32_t));
    stats = take(rows, sizeof(RowStats));
    partials = take(rows * instance_of(p), sizeof(float));
  }
  std::size_t item_offsets = 0, partial_offsets = 0, split_tiles = 0, num_splits = 0;
  std::size_t stats = 0, partials = 0;
  std::size_t end = 0;
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

Work work_of(const AttendParams& params, const StepLengths& lengths, const CutBounds& bounds,
             std::byte* workspace) {
  const Places places(params, lengths, bounds);
  const auto longs = [&](std::size_t place) {
    return reinterpret_cast<std::int64_t*>(workspace + place);
  };
  const auto ints = [&](std::size_t place) {
    return reinterpret_cast<std::int32_t*>(workspace + place);
  };
  Work work;
  work.attend = params;
  work.tiling = tiling_of(params.num_q_heads, params.num_kv_heads);
  work.shape = cut_shape(params);
  work.cut = {.item_offsets = longs(places.item_offsets),
              .partial_offsets = longs(places.partial_offsets),
              .split_tiles = ints(places.split_tiles),
              .num_splits = ints(places.num_splits)};
  work.dim = instance_of(params);
  work.partials = reinterpret_cast<float*>(workspace + places.partials);
  work.stats = reinterpret_cast<RowStats*>(workspace + places.stats);
  work.q_in_vectors = is_multiple(16, params.q, 2, params.q_layout);
  work.out_in_pairs =
      params.out_dtype == params.kv.dtype && is_multiple(4, params.out, 2, params.out_layout);
  work.max_items = bounds.num_items;
  return work;
}

Frequencies frequencies_of(const RopeParams& rope) {
  Frequencies frequencies{};
  if (rope.cos != nullptr) return frequencies;
  for (std::int32_t i = 0; i < rope.rotary_dim / 2; ++i)
    frequencies.values[i] = std::pow(rope.base, -2.0 * i / static_cast<double>(rope.rotary_dim));
  return frequencies;
}

}  // namespace

std::size_t workspace_bytes(const AttendParams& params, const StepLengths& lengths) {
  return Places(params, lengths, bounds_of(cut_shape(params), lengths)).end;
}

void attend(const AttendParams& params, const StepLengths& lengths, void* workspace,
            CUstream_st* stream) {
  check(pad_rows(params, stream), "pad_rows");
  const CutBounds bounds = bounds_of(cut_shape(params), lengths);
  if (bounds.num_items == 0) return;
  const Work work = work_of(params, lengths, bounds, static_cast<std::byte*>(workspace));
  const Frequencies frequencies = frequencies_of(params.rope);
  check(cut_step(work, stream), "cut_step");
  if (work.dim == 64) {
    check(attend_64(work, frequencies, stream), "attend_64");
  } else if (work.dim == 128) {
    check(attend_128(work, frequencies, stream), "attend_128");
  } else {
    check(attend_256(work, frequencies, stream), "attend_256");
  }
  if (bounds.num_partial_rows > 0) check(combine_partials(work, stream), "combine_partials");
}

}  // namespace octavo::kernels::flash2
