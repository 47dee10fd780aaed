// SPDX-License-Identifier: Apache-2.0
// Attention over our own cache.
#include <octavo/attention.h>

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

}  // namespace

Attention::Attention(const AttentionConfig& config, const CacheConfig& cache_config)
    : config_(api::checked(config)),
      cache_config_(api::checked(cache_config)),
      backend_(dispatch::or_environments(config_.backend)) {
  api::check_fit(config_, cache_config_);
  static_cast<void>(dispatch::choose(
      backend_, dispatch::make_request(config_, cache_config_.dtype, cache_config_.device)));
}

Explanation Attention::explain(const StepPlan& /*plan*/, TensorFormat /*format*/) const {
  return dispatch::explain_all(
      config_.backend, backend_,
      dispatch::make_request(config_, cache_config_.dtype, cache_config_.device));
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
