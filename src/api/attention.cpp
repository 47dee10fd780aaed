// SPDX-License-Identifier: Apache-2.0
// Attention over our own cache.
#include <octavo/attention.h>

#include <optional>
#include <utility>

#include "api/cache_impl.h"
#include "api/config.h"
#include "api/layer_call.h"
#include "base/error.h"

namespace octavo {
namespace {

void check_layer_call(const StepPlan& plan, const KvCache& cache, std::int32_t layer,
                      const LayerInputs& inputs, const CacheConfig& expected) {
  api::check_cache(cache, expected, layer);
  api::check_begun(plan, cache.impl());
  if (inputs.maxima != nullptr) api::check_within(plan, *inputs.maxima);
}

/// As much of a call as says what workspace it takes.
kernels::AttendParams explained_call(const AttentionConfig& config) {
  kernels::AttendParams params;
  params.num_q_heads = config.num_q_heads;
  params.num_kv_heads = config.num_kv_heads;
  params.head_dim = config.head_dim;
  params.head_dim_v = config.head_dim_v;
  params.causal = config.mask == Mask::Causal;
  params.window_left = config.window.left;
  params.window_right = config.window.right;
  params.batch_invariant = config.batch_invariant;
  return params;
}

kernels::StepLengths explained_lengths(const detail::PlanData& plan, const StepMaxima* maxima) {
  kernels::StepLengths lengths;
  if (maxima != nullptr) {
    api::check_maxima(*maxima);
    lengths.bounded = true;
    lengths.maxima = *maxima;
    return lengths;
  }
  lengths.batch = {.num_seqs = static_cast<std::int32_t>(plan.ids.size()),
                   .num_tokens = plan.num_tokens,
                   .token_offsets = plan.token_offsets.data(),
                   .kv_lens = plan.kv_lens.data()};
  return lengths;
}

}  // namespace

Attention::Attention(const AttentionConfig& config, const CacheConfig& cache_config)
    : config_(api::checked(config)),
      cache_config_(api::checked(cache_config)),
      backend_(dispatch::or_environments(config_.backend)) {
  api::check_fit(config_, cache_config_);
  static_cast<void>(dispatch::choose(
      backend_, dispatch::make_request(config_, cache_config_.dtype, cache_config_.device)));
}

Explanation Attention::explain(const StepPlan& plan, TensorFormat /*format*/,
                               const StepMaxima* maxima) const {
  dispatch::Request request =
      dispatch::make_request(config_, cache_config_.dtype, cache_config_.device);
  if (cache_config_.device.type == DeviceType::Cpu || plan.data() == nullptr)
    return dispatch::explain_all(config_.backend, backend_, request);
  const device::DeviceGuard guard(cache_config_.device);
  const kernels::AttendParams params = explained_call(config_);
  const kernels::StepLengths lengths = explained_lengths(*plan.data(), maxima);
  const auto workspace_of = [&](Backend backend) -> std::optional<dispatch::WorkspaceBytes> {
    // What cuDNN takes is known when a graph is built, which explaining is not worth.
    if (backend == Backend::Fused) return std::nullopt;
    return dispatch::WorkspaceBytes{
        dispatch::least_call_bytes(backend, params, lengths, cache_config_.device),
        static_cast<std::size_t>(cache_config_.workspace_bytes)};
  };
  return dispatch::explain_with_workspace(config_.backend, backend_, std::move(request),
                                          workspace_of);
}

void Attention::append(const StepPlan& plan, KvCache& cache, std::int32_t layer,
                       const LayerInputs& inputs, Stream stream) const {
  check_layer_call(plan, cache, layer, inputs, cache_config_);
  api::LayerCall call(*this, cache.impl(), layer, inputs, stream);
  call.check_append();
  call.append(stream);
}

void Attention::attend(const StepPlan& plan, KvCache& cache, std::int32_t layer,
                       const LayerInputs& inputs, const TensorView& out, const TensorView* lse,
                       Stream stream) const {
  check_layer_call(plan, cache, layer, inputs, cache_config_);
  api::LayerCall call(*this, cache.impl(), layer, inputs, stream);
  call.check_attend(out, lse);
  call.attend(stream);
}

void Attention::forward(const StepPlan& plan, KvCache& cache, std::int32_t layer,
                        const LayerInputs& inputs, const TensorView& out, const TensorView* lse,
                        Stream stream) const {
  check_layer_call(plan, cache, layer, inputs, cache_config_);
  api::LayerCall call(*this, cache.impl(), layer, inputs, stream);
  call.check_append();
  call.check_attend(out, lse);
  call.append(stream);
  call.attend(stream);
}

}  // namespace octavo
