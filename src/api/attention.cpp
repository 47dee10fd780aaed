// SPDX-License-Identifier: Apache-2.0
// Attention over our own cache.
#include <octavo/attention.h>

#include "api/cache_impl.h"
#include "api/config.h"
#include "api/layer.h"
#include "base/error.h"
#include "dispatch/run.h"

namespace octavo {
namespace {

void check_layer_call(const StepPlan& plan, const KvCache& cache, std::int32_t layer,
                      const CacheConfig& expected) {
  const CacheConfig& got = cache.config();
  const bool same_cache = got.kind == expected.kind && got.num_kv_heads == expected.num_kv_heads &&
                          got.head_dim == expected.head_dim &&
                          got.head_dim_v == expected.head_dim_v && got.dtype == expected.dtype &&
                          got.device == expected.device;
  if (!same_cache) {
    const auto text = [](const CacheConfig& c) {
      return fmt::format("{} {} with {} KV heads of {}/{} on {}", to_string(c.kind),
                         to_string(c.dtype), c.num_kv_heads, c.head_dim, c.head_dim_v,
                         to_string(c.device.type));
    };
    base::throw_mismatch("cache", text(expected) + " (as this Attention was made for)", text(got));
  }
  if (layer < 0 || layer >= got.num_layers) {
    base::throw_mismatch("layer", fmt::format("0 … {}", got.num_layers - 1), layer);
  }
  if (plan.data() == nullptr || plan.data() != cache.impl().begun.data()) {
    base::throw_mismatch("plan", "the one that this cache began last",
                         "another one, or one that was not begun");
  }
}

api::StepShape step_shape(const StepPlan& plan, TensorFormat format) {
  return {format, plan.num_seqs(), plan.num_tokens(), plan.max_new_tokens()};
}

}  // namespace

Attention::Attention(const AttentionConfig& config, const CacheConfig& cache_config)
    : config_(api::checked(config)), cache_config_(api::checked(cache_config)) {
  api::check_fit(config_, cache_config_);
  static_cast<void>(dispatch::choose(
      config_.backend, dispatch::make_request(config_, cache_config_.dtype, cache_config_.device)));
}

Explanation Attention::explain(const StepPlan& /*plan*/, TensorFormat /*format*/) const {
  return dispatch::explain_all(
      config_.backend, dispatch::make_request(config_, cache_config_.dtype, cache_config_.device));
}

void Attention::append(const StepPlan& plan, KvCache& cache, std::int32_t layer,
                       const LayerInputs& inputs, Stream /*stream*/) const {
  check_layer_call(plan, cache, layer, cache_config_);
  const detail::CacheImpl& impl = cache.impl();
  dispatch::append(api::append_params(config_, inputs, step_shape(plan, inputs.format),
                                      impl.begun_batch(), impl.pages_of_layer(layer)));
}

void Attention::attend(const StepPlan& plan, KvCache& cache, std::int32_t layer,
                       const LayerInputs& inputs, const TensorView& out, const TensorView* lse,
                       Stream /*stream*/) const {
  check_layer_call(plan, cache, layer, cache_config_);
  detail::CacheImpl& impl = cache.impl();
  const kernels::AttendParams params =
      api::attend_params(config_, inputs, step_shape(plan, inputs.format), impl.begun_batch(),
                         impl.pages_of_layer(layer), out, lse);
  const Backend backend =
      dispatch::choose(config_.backend, api::attend_request(config_, params, cache_config_.device));
  dispatch::attend(backend, config_.batch_invariant, params, plan.data()->schedules,
                   impl.workspace);
}

void Attention::forward(const StepPlan& plan, KvCache& cache, std::int32_t layer,
                        const LayerInputs& inputs, const TensorView& out, const TensorView* lse,
                        Stream /*stream*/) const {
  check_layer_call(plan, cache, layer, cache_config_);
  detail::CacheImpl& impl = cache.impl();
  const api::StepShape shape = step_shape(plan, inputs.format);
  const kernels::StepBatch batch = impl.begun_batch();
  const kernels::KvPages pages = impl.pages_of_layer(layer);
  // Both halves are checked before the first writes.
  const kernels::AppendParams append_params =
      api::append_params(config_, inputs, shape, batch, pages);
  const kernels::AttendParams attend_params =
      api::attend_params(config_, inputs, shape, batch, pages, out, lse);
  const Backend backend = dispatch::choose(
      config_.backend, api::attend_request(config_, attend_params, cache_config_.device));
  dispatch::append(append_params);
  dispatch::attend(backend, config_.batch_invariant, attend_params, plan.data()->schedules,
                   impl.workspace);
}

}  // namespace octavo
