// SPDX-License-Identifier: Apache-2.0
// Attention over a cache that the caller manages.
#include <octavo/attention.h>

#include <algorithm>

#include "api/callers_cache.h"
#include "api/config.h"
#include "api/layer.h"
#include "api/workspace_impl.h"
#include "base/error.h"
#include "base/math.h"
#include "device/gpu.h"
#include "dispatch/run.h"

namespace octavo {
namespace {

kernels::PagedTensor paged_tensor(const TensorView& view) {
  return {view.data, view.strides[0], view.strides[1], view.strides[2], view.strides[3]};
}

std::int32_t checked_row(const KvView& cache, std::int32_t b) {
  const std::int64_t num_rows = cache.page_table != nullptr ? cache.num_rows : cache.k.shape[0];
  const std::int32_t row = cache.row_indices != nullptr ? cache.row_indices[b] : b;
  if (row < 0 || row >= num_rows) {
    base::throw_mismatch(cache.row_indices != nullptr ? fmt::format("cache.row_indices[{}]", b)
                                                      : fmt::format("the row of sequence {}", b),
                         fmt::format("0 … {}", num_rows - 1), row);
  }
  return row;
}

/// The slots of a sequence of kv_len tokens: row and pages in range.
void check_keys(const KvView& cache, std::int32_t b, std::int64_t kv_len, std::int32_t least) {
  const std::int64_t page_size = cache.k.shape[1];
  const std::int64_t capacity =
      cache.page_table != nullptr ? cache.max_pages_per_seq * page_size : page_size;
  if (kv_len < least || kv_len > capacity) {
    base::throw_mismatch(fmt::format("step.kv_lens[{}]", b),
                         fmt::format("{} … {}", least, capacity), kv_len, "new tokens included");
  }
  if (kv_len == 0) return;
  const std::int32_t row = checked_row(cache, b);
  if (cache.page_table == nullptr) return;
  const std::int32_t* pages = cache.page_table + row * cache.page_table_stride;
  const std::int64_t num_pages = cache.k.shape[0];
  for (std::int64_t i = 0; i < base::ceil_div(kv_len, page_size); ++i) {
    if (pages[i] < 0 || pages[i] >= num_pages) {
      base::throw_mismatch(fmt::format("cache.page_table[{}, {}]", row, i),
                           fmt::format("0 … {}", num_pages - 1), pages[i]);
    }
  }
}

void check_sequence(const KvView& cache, const StepArrays& step, std::int32_t b, bool appends) {
  const std::int32_t new_tokens = step.token_offsets[b + 1] - step.token_offsets[b];
  if (new_tokens < 0) {
    base::throw_mismatch(fmt::format("step.token_offsets[{}]", b + 1),
                         fmt::format("at least {}", step.token_offsets[b]),
                         step.token_offsets[b + 1], "prefix sums don't fall");
  }
  check_keys(cache, b, step.kv_lens[b], appends ? new_tokens : 0);
}

/// What holds of table and arrays wherever they lie.
void check_table(const KvView& cache, const StepArrays& step) {
  if (step.num_seqs < 0) base::throw_mismatch("step.num_seqs", "at least 0", step.num_seqs);
  if (step.kv_lens == nullptr && step.num_seqs > 0)
    base::throw_mismatch("step.kv_lens", "a pointer", "null");
  if (cache.page_table != nullptr) {
    if (cache.max_pages_per_seq < 0)
      base::throw_mismatch("cache.max_pages_per_seq", "at least 0", cache.max_pages_per_seq);
    if (cache.num_rows < 0) base::throw_mismatch("cache.num_rows", "at least 0", cache.num_rows);
    if (cache.page_table_stride < 1 && cache.num_rows > 1)
      base::throw_mismatch("cache.page_table_stride", "at least 1", cache.page_table_stride);
  }
  if (cache.k.shape[1] == 0 && step.num_seqs > 0)
    base::throw_mismatch("cache.k.shape[1]", "at least 1 slot", 0);
  const Device device = cache.k.device;
  const std::int64_t entries = std::int64_t{cache.num_rows} * cache.max_pages_per_seq;
  api::check_pointer("step.token_offsets", step.token_offsets, 1, device);
  api::check_pointer("step.kv_lens", step.kv_lens, step.num_seqs, device);
  api::check_pointer("cache.page_table", cache.page_table, entries, device);
  api::check_pointer("cache.row_indices", cache.row_indices, step.num_seqs, device);
}

kernels::StepBatch batch_of(const KvView& cache, const StepArrays& step) {
  return {.num_seqs = step.num_seqs,
          .num_tokens = step.num_tokens,
          .token_offsets = step.token_offsets,
          .kv_lens = step.kv_lens,
          .rows = cache.row_indices,
          .page_table = cache.page_table,
          .page_table_stride = cache.page_table_stride,
          .clear_lens = nullptr};
}

kernels::StepBatch checked_batch(const KvView& cache, const StepArrays& step, bool appends) {
  check_table(cache, step);
  if (step.token_offsets == nullptr)
    base::throw_mismatch("step.token_offsets", "a pointer", "null");
  if (step.token_offsets[0] != 0)
    base::throw_mismatch("step.token_offsets[0]", 0, step.token_offsets[0]);
  for (std::int32_t b = 0; b < step.num_seqs; ++b) check_sequence(cache, step, b, appends);
  if (step.token_offsets[step.num_seqs] != step.num_tokens) {
    base::throw_mismatch(fmt::format("step.token_offsets[{}]", step.num_seqs),
                         fmt::format("{} (num_tokens)", step.num_tokens),
                         step.token_offsets[step.num_seqs]);
  }
  return batch_of(cache, step);
}

api::StepShape step_shape(const StepArrays& step, TensorFormat format) {
  api::StepShape shape{format, step.num_seqs, step.num_tokens};
  for (std::int32_t b = 0; b < step.num_seqs; ++b) {
    shape.max_new_tokens =
        std::max(shape.max_new_tokens, step.token_offsets[b + 1] - step.token_offsets[b]);
  }
  return shape;
}

/// A checked attention call on the CPU.
struct HostAttend {
  HostAttend(const AttentionConfig& config, const KvView& cache, const StepArrays& step,
             const LayerInputs& inputs, const TensorView& out, const TensorView* lse) {
    const kernels::KvPages pages = api::checked_pages(config, cache, false, {});
    const kernels::StepBatch batch = checked_batch(cache, step, false);
    const api::StepShape shape = step_shape(step, inputs.format);
    params = api::attend_params(config, inputs, shape, {batch, batch}, pages, out, lse);
    backend = dispatch::choose(dispatch::or_environments(config.backend),
                               api::attend_request(config, params, shape));
  }
  kernels::AttendParams params;
  Backend backend = Backend::Auto;
};

}  // namespace

namespace api {

kernels::KvPages checked_pages(const AttentionConfig& config, const KvView& cache, bool writable,
                               Device device) {
  check_tensor("cache.k", cache.k, 4, device);
  check_tensor("cache.v", cache.v, 4, device);
  check_extent("cache.k", cache.k, 2, config.num_kv_heads);
  check_extent("cache.k", cache.k, 3, config.head_dim);
  check_extent("cache.v", cache.v, 0, cache.k.shape[0]);
  check_extent("cache.v", cache.v, 1, cache.k.shape[1]);
  check_extent("cache.v", cache.v, 2, config.num_kv_heads);
  check_extent("cache.v", cache.v, 3, config.head_dim_v);
  if (cache.v.dtype != cache.k.dtype) {
    base::throw_mismatch("cache.v.dtype", fmt::format("{} (k's)", to_string(cache.k.dtype)),
                         to_string(cache.v.dtype));
  }
  constexpr std::int64_t kMaxInt32 = 0x7FFFFFFF;
  for (const std::int32_t axis : {0, 1}) {
    const std::int64_t extent = cache.k.shape[static_cast<std::size_t>(axis)];
    if (extent > kMaxInt32)
      base::throw_mismatch(fmt::format("cache.k.shape[{}]", axis), "at most 2^31 - 1", extent);
  }
  if (writable) {
    check_writable("cache.k", cache.k);
    check_writable("cache.v", cache.v);
  }
  return {.k = paged_tensor(cache.k),
          .v = paged_tensor(cache.v),
          .dtype = cache.k.dtype,
          .num_pages = cache.k.shape[0],
          .page_size = static_cast<std::int32_t>(cache.k.shape[1])};
}

kernels::StepBatch checked_lengths(const KvView& cache, const StepArrays& step) {
  check_table(cache, step);
  for (std::int32_t b = 0; b < step.num_seqs; ++b) check_keys(cache, b, step.kv_lens[b], 0);
  return batch_of(cache, step);
}

kernels::StepBatch device_lengths(const KvView& cache, const StepArrays& step) {
  check_table(cache, step);
  return batch_of(cache, step);
}

}  // namespace api

void attend(const AttentionConfig& config, const KvView& cache, const StepArrays& step,
            const LayerInputs& inputs, const TensorView& out, const TensorView* lse,
            Stream stream) {
  const AttentionConfig c = api::checked(config);
  if (cache.k.device.type == DeviceType::Cuda) {
    api::attend_on_gpu({c, cache, step, inputs, out, lse, stream});
    return;
  }
  const HostAttend call(c, cache, step, inputs, out, lse);
  plan::StepMemory memory;
  device::HostBuffer workspace;
  dispatch::attend(call.backend, c.batch_invariant, call.params, memory, workspace);
}

void check_attend(const AttentionConfig& config, const KvView& cache, const StepArrays& step,
                  const LayerInputs& inputs, const TensorView& out, const TensorView* lse,
                  Stream stream) {
  const AttentionConfig c = api::checked(config);
  if (cache.k.device.type == DeviceType::Cuda) {
    api::check_attend_on_gpu({c, cache, step, inputs, out, lse, stream});
  } else {
    static_cast<void>(HostAttend(c, cache, step, inputs, out, lse));
  }
}

void append_tokens(const AttentionConfig& config, const KvView& cache, const StepArrays& step,
                   const LayerInputs& inputs, Stream stream) {
  const AttentionConfig c = api::checked(config);
  if (cache.k.device.type == DeviceType::Cuda) {
    api::append_on_gpu(c, cache, step, inputs, stream);
    return;
  }
  const kernels::KvPages pages = api::checked_pages(c, cache, true, {});
  const kernels::StepBatch batch = checked_batch(cache, step, true);
  // Asked of the definition, which takes every layout: the append depends on nothing else.
  static_cast<void>(
      dispatch::choose(Backend::Unfused, dispatch::make_request(c, pages.dtype, cache.k.device)));
  plan::StepMemory memory;
  dispatch::append(
      api::append_params(c, inputs, step_shape(step, inputs.format), {batch, batch}, pages),
      memory);
}

Explanation explain(const AttentionConfig& config, const KvView& cache, const LayerInputs& inputs) {
  const AttentionConfig c = api::checked(config);
  const Device device = cache.k.device;
  if (device.type == DeviceType::Cuda)
    static_cast<void>(device::require_gpu(device, "cache.k.device"));
  const device::DeviceGuard guard(device);
  const kernels::KvPages pages = api::checked_pages(c, cache, false, device);
  dispatch::Request request = dispatch::make_request(c, pages.dtype, device);
  request.dense_cache_rows = (pages.k.dim_stride == 1 || c.head_dim == 1) &&
                             (pages.v.dim_stride == 1 || c.head_dim_v == 1);
  request.aligned_cache_rows = api::has_aligned_rows(pages);
  request.near_cache_rows = dispatch::has_near_rows(pages);
  const bool has_q = inputs.q.rank > 0 && inputs.q.rank <= kMaxRank;
  if (has_q) {
    request.q_dtype = inputs.q.dtype;
    request.dense_token_rows =
        inputs.q.strides[static_cast<std::size_t>(inputs.q.rank - 1)] == 1 || c.head_dim == 1;
  }
  if (device.type == DeviceType::Cuda) {
    // What is not known of q and out is taken to fit.
    kernels::AttendParams params;
    params.kv = pages;
    params.head_dim = c.head_dim;
    params.head_dim_v = c.head_dim_v;
    params.q_dtype = has_q ? inputs.q.dtype : pages.dtype;
    params.out_dtype = params.q_dtype;
    params.q_layout.dim_stride = request.dense_token_rows ? 1 : 0;
    params.q_layout.ragged = inputs.format == TensorFormat::Thd;
    params.softcap = c.softcap;
    params.causal = c.mask == Mask::Causal;
    params.window_left = c.window.left;
    params.window_right = c.window.right;
    params.sinks = inputs.sinks;
    params.alibi_slopes = inputs.alibi_slopes;
    params.rope.rotary_dim = inputs.rope == nullptr ? 0 : 1;
    kernels::fused::describe(params, request.fused);
  }
  return dispatch::explain_all(c.backend, dispatch::or_environments(c.backend), request);
}

}  // namespace octavo
