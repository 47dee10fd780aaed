// SPDX-License-Identifier: Apache-2.0
#include "api/layer.h"

#include <string>

#include "base/error.h"

namespace octavo::api {

kernels::AppendParams append_params(const AttentionConfig& config, const LayerInputs& inputs,
                                    const StepShape& shape, const StepBatches& batches,
                                    const kernels::KvPages& pages) {
  kernels::AppendParams params;
  params.batch = batches.device;
  params.kv = pages;
  params.k = inputs.k.data;
  params.v = inputs.v.data;
  params.k_dtype = inputs.k.dtype;
  params.v_dtype = inputs.v.dtype;
  params.k_layout = token_layout("k", inputs.k, shape, config.num_kv_heads, config.head_dim, false);
  params.v_layout =
      token_layout("v", inputs.v, shape, config.num_kv_heads, config.head_dim_v, false);
  params.num_kv_heads = config.num_kv_heads;
  params.head_dim = config.head_dim;
  params.head_dim_v = config.head_dim_v;
  params.rope = rope_params(inputs, config.head_dim, batches.host, shape);
  params.num_threads = config.num_threads;
  return params;
}

kernels::AttendParams attend_params(const AttentionConfig& config, const LayerInputs& inputs,
                                    const StepShape& shape, const StepBatches& batches,
                                    const kernels::KvPages& pages, const TensorView& out,
                                    const TensorView* lse) {
  kernels::AttendParams params;
  params.batch = batches.device;
  params.kv = pages;
  params.num_q_heads = config.num_q_heads;
  params.num_kv_heads = config.num_kv_heads;
  params.head_dim = config.head_dim;
  params.head_dim_v = config.head_dim_v;
  params.q = inputs.q.data;
  params.q_dtype = inputs.q.dtype;
  params.q_layout = token_layout("q", inputs.q, shape, config.num_q_heads, config.head_dim, false);
  params.out = out.data;
  params.out_dtype = out.dtype;
  params.out_layout = token_layout("out", out, shape, config.num_q_heads, config.head_dim_v, true);
  if (out.dtype != DType::F32 && out.dtype != inputs.q.dtype) {
    const bool narrow = inputs.q.dtype != DType::F32;
    base::throw_mismatch(
        "out.dtype",
        narrow ? fmt::format("f32 or {} (q's)", to_string(inputs.q.dtype)) : std::string("f32"),
        to_string(out.dtype));
  }
  const bool in_place = shape.device.type == DeviceType::Cpu && same_view(out, inputs.q);
  if (!in_place) check_apart("out", out, "q", inputs.q);
  set_lse(lse, shape.device, params);
  params.scale = config.softmax_scale;
  params.softcap = config.softcap;
  params.causal = config.mask == Mask::Causal;
  params.window_left = config.window.left;
  params.window_right = config.window.right;
  check_pointer("sinks", inputs.sinks, config.num_q_heads, shape.device);
  check_pointer("alibi_slopes", inputs.alibi_slopes, config.num_q_heads, shape.device);
  params.sinks = inputs.sinks;
  params.alibi_slopes = inputs.alibi_slopes;
  params.rope = rope_params(inputs, config.head_dim, batches.host, shape);
  params.batch_invariant = config.batch_invariant;
  params.num_threads = config.num_threads;
  return params;
}

bool has_aligned_rows(const kernels::KvPages& pages) {
  const auto aligned = [&](const kernels::PagedTensor& tensor) {
    const std::int64_t strides = tensor.page_stride | tensor.slot_stride | tensor.head_stride;
    return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 &&
           strides * dtype_bytes(pages.dtype) % 16 == 0;
  };
  return aligned(pages.k) && aligned(pages.v);
}

dispatch::Request attend_request(const AttentionConfig& config, const kernels::AttendParams& params,
                                 const StepShape& shape) {
  dispatch::Request request = dispatch::make_request(config, params.kv.dtype, shape.device);
  request.q_dtype = params.q_dtype;
  request.dense_cache_rows = (params.kv.k.dim_stride == 1 || config.head_dim == 1) &&
                             (params.kv.v.dim_stride == 1 || config.head_dim_v == 1);
  request.dense_token_rows = (params.q_layout.dim_stride == 1 || config.head_dim == 1) &&
                             (params.out_layout.dim_stride == 1 || config.head_dim_v == 1);
  request.aligned_cache_rows = has_aligned_rows(params.kv);
  request.near_cache_rows = dispatch::has_near_rows(params.kv);
  request.fused.q_len = shape.max_new_tokens;
  request.fused.kv_len = shape.max_kv_len;
  if (shape.device.type == DeviceType::Cuda) kernels::fused::describe(params, request.fused);
  return request;
}

void check_within(const StepPlan& plan, const StepMaxima& maxima) {
  const auto check = [](const char* what, std::int32_t most, std::int32_t got) {
    if (got > most) base::throw_mismatch(what, fmt::format("at most {}", most), got);
  };
  check("plan.num_seqs", maxima.num_seqs, plan.num_seqs());
  check("plan.num_tokens", maxima.num_tokens, plan.num_tokens());
  check("plan.max_new_tokens", maxima.max_new_tokens, plan.max_new_tokens());
  check("plan.max_kv_len", maxima.max_kv_len, plan.max_kv_len());
}

void check_maxima(const StepMaxima& maxima) {
  const auto check = [](const char* what, std::int32_t got) {
    if (got < 1) base::throw_mismatch(what, "at least 1", got);
  };
  check("maxima.num_seqs", maxima.num_seqs);
  check("maxima.num_tokens", maxima.num_tokens);
  check("maxima.max_new_tokens", maxima.max_new_tokens);
  check("maxima.max_kv_len", maxima.max_kv_len);
}

}  // namespace octavo::api
