// SPDX-License-Identifier: Apache-2.0
#include <octavo/convert.h>

#include <algorithm>

#include "api/cache_impl.h"
#include "api/callers_cache.h"
#include "api/tensors.h"
#include "base/error.h"
#include "device/gpu.h"
#include "dispatch/run.h"

namespace octavo {
namespace {

void run(const kernels::ConvertParams& params, Device device, Stream stream) {
  if (device.type == DeviceType::Cpu) {
    dispatch::convert(params);
    return;
  }
  const device::DeviceGuard guard(device);
  device::check_stream(device, stream);
  dispatch::convert_on_gpu(params, stream);
}

void run(const kernels::GatherParams& params, Device device, Stream stream) {
  if (device.type == DeviceType::Cpu) {
    dispatch::gather(params);
    return;
  }
  const device::DeviceGuard guard(device);
  device::check_stream(device, stream);
  dispatch::gather_on_gpu(params, stream);
}

void run(const kernels::ListedParams& params, Device device, Stream stream) {
  if (device.type == DeviceType::Cpu) {
    for (std::int32_t i = 0; i < params.num_tokens; ++i) {
      const kernels::ListedPlace place = kernels::place_of_listed(params, i);
      params.rows[i] = place.row;
      params.kv_lens[i] = place.kv_len;
    }
    return;
  }
  const device::DeviceGuard guard(device);
  device::check_stream(device, stream);
  dispatch::locate_on_gpu(params, stream);
}

void check_rank(const char* name, const ConstTensorView& tensor, std::int32_t rank) {
  if (tensor.rank != rank) base::throw_mismatch(fmt::format("{}.rank", name), rank, tensor.rank);
}

std::int32_t longest_of(const StepArrays& step) {
  std::int32_t longest = 0;
  for (std::int32_t b = 0; b < step.num_seqs; ++b) {
    const std::int32_t count = step.token_offsets[b + 1] - step.token_offsets[b];
    if (count < 0) {
      base::throw_mismatch(fmt::format("step.token_offsets[{}]", b + 1),
                           fmt::format("at least {}", step.token_offsets[b]),
                           step.token_offsets[b + 1], "prefix sums don't fall");
    }
    longest = std::max(longest, count);
  }
  if (step.token_offsets[0] != 0)
    base::throw_mismatch("step.token_offsets[0]", 0, step.token_offsets[0]);
  if (step.token_offsets[step.num_seqs] != step.num_tokens) {
    base::throw_mismatch(fmt::format("step.token_offsets[{}]", step.num_seqs),
                         fmt::format("{} (num_tokens)", step.num_tokens),
                         step.token_offsets[step.num_seqs]);
  }
  return longest;
}

/// Where rows of gathered keys or values go.
void set_target(const char* name, const TensorView& to, std::int32_t num_seqs,
                std::int32_t num_heads, std::int32_t dim, Device device,
                kernels::GatherParams& params) {
  api::check_tensor(name, to, 4, device);
  if (to.dtype != DType::F32 && to.dtype != DType::F16 && to.dtype != DType::BF16) {
    base::throw_mismatch(fmt::format("{}.dtype", name), "f32, f16 or bf16", to_string(to.dtype));
  }
  if (to.shape[0] < num_seqs) {
    base::throw_mismatch(fmt::format("{}.shape[0]", name), fmt::format("at least {}", num_seqs),
                         to.shape[0]);
  }
  api::check_extent(name, to, 2, num_heads);
  api::check_extent(name, to, 3, dim);
  api::check_writable(name, to);
  params.to = to.data;
  params.to_dtype = to.dtype;
  params.to_seq_stride = to.strides[0];
  params.to_slot_stride = to.strides[1];
  params.to_head_stride = to.strides[2];
  params.to_dim_stride = to.strides[3];
  params.num_seqs = num_seqs;
  params.num_heads = num_heads;
  params.dim = params.padded_dim = dim;
  params.num_slots = to.shape[1];
}

struct Dims {
  std::int32_t num_kv_heads;
  std::int32_t head_dim;
  std::int32_t head_dim_v;
};

void gather_both(const kernels::StepBatch& batch, const kernels::KvPages& pages, Dims dims,
                 std::int32_t num_rows, std::int64_t max_slots, const TensorView& k,
                 const TensorView& v, Device device, Stream stream) {
  kernels::GatherParams keys{.batch = batch,
                             .from = pages.k,
                             .from_dtype = pages.dtype,
                             .num_pages = pages.num_pages,
                             .page_size = pages.page_size,
                             .num_rows = num_rows,
                             .max_slots = max_slots};
  kernels::GatherParams values = keys;
  values.from = pages.v;
  set_target("k", k, batch.num_seqs, dims.num_kv_heads, dims.head_dim, device, keys);
  set_target("v", v, batch.num_seqs, dims.num_kv_heads, dims.head_dim_v, device, values);
  run(keys, device, stream);
  run(values, device, stream);
}

}  // namespace

void convert_tokens(const ConstTensorView& from, TensorFormat from_format, const TensorView& to,
                    TensorFormat to_format, const StepArrays& step, Stream stream) {
  const Device device = to.device;
  if (device.type == DeviceType::Cuda) static_cast<void>(device::require_gpu(device, "to.device"));
  if (step.num_seqs < 0) base::throw_mismatch("step.num_seqs", "at least 0", step.num_seqs);
  if (step.num_tokens < 0) base::throw_mismatch("step.num_tokens", "at least 0", step.num_tokens);
  if (step.token_offsets == nullptr)
    base::throw_mismatch("step.token_offsets", "a pointer", "null");
  api::check_pointer("step.token_offsets", step.token_offsets, 1, device);
  api::StepShape shape{from_format, step.num_seqs, step.num_tokens};
  shape.device = device;
  shape.max_new_tokens = device.type == DeviceType::Cpu ? longest_of(step) : 0;
  check_rank("from", from, from_format == TensorFormat::Thd ? 3 : 4);
  const auto head_axis = static_cast<std::size_t>(from.rank - 2);
  kernels::ConvertParams params;
  params.num_heads = static_cast<std::int32_t>(from.shape[head_axis]);
  params.dim = static_cast<std::int32_t>(from.shape[head_axis + 1]);
  params.from_layout = api::token_layout("from", from, shape, params.num_heads, params.dim, false);
  shape.format = to_format;
  params.to_layout = api::token_layout("to", to, shape, params.num_heads, params.dim, true);
  params.batch.num_seqs = step.num_seqs;
  params.batch.num_tokens = step.num_tokens;
  params.batch.token_offsets = step.token_offsets;
  params.from = from.data;
  params.from_dtype = from.dtype;
  params.to = to.data;
  params.to_dtype = to.dtype;
  run(params, device, stream);
}

void gather_cache(const KvView& cache, const StepArrays& step, const TensorView& k,
                  const TensorView& v, Stream stream) {
  const Device device = cache.k.device;
  if (device.type == DeviceType::Cuda)
    static_cast<void>(device::require_gpu(device, "cache.k.device"));
  check_rank("cache.k", cache.k, 4);
  check_rank("cache.v", cache.v, 4);
  const Dims dims{static_cast<std::int32_t>(cache.k.shape[2]),
                  static_cast<std::int32_t>(cache.k.shape[3]),
                  static_cast<std::int32_t>(cache.v.shape[3])};
  AttentionConfig config;
  config.num_kv_heads = dims.num_kv_heads;
  config.head_dim = dims.head_dim;
  config.head_dim_v = dims.head_dim_v;
  const kernels::KvPages pages = api::checked_pages(config, cache, false, device);
  const kernels::StepBatch batch = device.type == DeviceType::Cpu
                                       ? api::checked_lengths(cache, step)
                                       : api::device_lengths(cache, step);
  const std::int64_t max_slots = cache.page_table != nullptr
                                     ? std::int64_t{cache.max_pages_per_seq} * pages.page_size
                                     : pages.page_size;
  const auto num_rows =
      cache.page_table != nullptr ? cache.num_rows : static_cast<std::int32_t>(pages.num_pages);
  gather_both(batch, pages, dims, num_rows, max_slots, k, v, device, stream);
}

void gather_cache(const StepPlan& plan, const KvCache& cache, std::int32_t layer,
                  const TensorView& k, const TensorView& v, Stream stream) {
  const detail::CacheImpl& impl = cache.impl();
  const CacheConfig& c = impl.config;
  if (plan.data() == nullptr || plan.data() != impl.begun.data()) {
    base::throw_mismatch("plan", "the one that this cache began last",
                         "another one, or one that was not begun");
  }
  if (layer < 0 || layer >= c.num_layers) {
    base::throw_mismatch("layer", fmt::format("0 … {}", c.num_layers - 1), layer);
  }
  const std::int64_t max_slots = std::int64_t{impl.store.max_pages_per_seq()} * c.page_size;
  gather_both(impl.begun_batch(), impl.pages_of_layer(layer),
              {c.num_kv_heads, c.head_dim, c.head_dim_v}, c.max_num_seqs, max_slots, k, v, c.device,
              stream);
}

void locate_tokens(const ListedTokens& tokens, std::int32_t* rows, std::int32_t* kv_lens,
                   Stream stream) {
  const Device device = tokens.device;
  if (device.type == DeviceType::Cuda)
    static_cast<void>(device::require_gpu(device, "tokens.device"));
  const auto at_least = [](const char* what, std::int32_t wanted, std::int32_t got) {
    if (got < wanted) base::throw_mismatch(what, fmt::format("at least {}", wanted), got);
  };
  at_least("tokens.num_tokens", 0, tokens.num_tokens);
  at_least("tokens.num_seqs", 0, tokens.num_seqs);
  at_least("tokens.num_pages", 0, tokens.num_pages);
  at_least("tokens.page_size", 1, tokens.page_size);
  if (tokens.num_tokens == 0) return;
  const auto lies_there = [&](const char* what, const std::int32_t* pointer, std::int64_t count) {
    if (pointer == nullptr) base::throw_mismatch(what, "a pointer", "null");
    api::check_pointer(what, pointer, count, device);
  };
  lies_there("tokens.seqs", tokens.seqs, tokens.num_tokens);
  lies_there("tokens.positions", tokens.positions, tokens.num_tokens);
  lies_there("tokens.page_offsets", tokens.page_offsets, std::int64_t{tokens.num_seqs} + 1);
  lies_there("rows", rows, tokens.num_tokens);
  lies_there("kv_lens", kv_lens, tokens.num_tokens);
  const kernels::ListedParams params{.seqs = tokens.seqs,
                                     .positions = tokens.positions,
                                     .page_offsets = tokens.page_offsets,
                                     .num_tokens = tokens.num_tokens,
                                     .num_seqs = tokens.num_seqs,
                                     .num_pages = tokens.num_pages,
                                     .page_size = tokens.page_size,
                                     .rows = rows,
                                     .kv_lens = kv_lens};
  run(params, device, stream);
}

}  // namespace octavo
