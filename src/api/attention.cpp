// SPDX-License-Identifier: Apache-2.0
// Attention over our own cache.
#include <octavo/attention.h>

#include "api/cache_impl.h"
#include "api/config.h"
#include "api/layer.h"
#include "base/error.h"
#include "device/gpu.h"
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

api::StepShape step_shape(const StepPlan& plan, TensorFormat format, Device device) {
  return {format, plan.num_seqs(), plan.num_tokens(), plan.max_new_tokens(), device};
}

/// One layer call over a begun step: checks, then runs. Everything is checked before anything is
/// written.
class LayerCall {
 public:
  LayerCall(const AttentionConfig& config, const StepPlan& plan, detail::CacheImpl& impl,
            std::int32_t layer, const LayerInputs& inputs, Stream stream)
      : config_(config),
        plan_(plan),
        impl_(impl),
        inputs_(inputs),
        stream_(stream),
        guard_(impl.config.device),
        shape_(step_shape(plan, inputs.format, impl.config.device)),
        batches_{impl.begun_batch(), impl.begun_host_batch()},
        pages_(impl.pages_of_layer(layer)) {
    if (impl.gpu != nullptr) device::check_stream(impl.config.device, stream);
  }

  void check_append() {
    append_params_ = api::append_params(config_, inputs_, shape_, batches_, pages_);
  }

  void check_attend(const TensorView& out, const TensorView* lse) {
    attend_params_ = api::attend_params(config_, inputs_, shape_, batches_, pages_, out, lse);
    backend_ = dispatch::choose(config_.backend,
                                api::attend_request(config_, attend_params_, impl_.config.device));
    if (impl_.gpu != nullptr) impl_.gpu->check_attend(backend_, attend_params_, batches_.host);
  }

  void append() {
    if (impl_.gpu != nullptr) {
      impl_.gpu->append(append_params_, stream_);
    } else {
      dispatch::append(append_params_);
    }
  }

  void attend() {
    if (impl_.gpu != nullptr) {
      impl_.gpu->attend(backend_, attend_params_, batches_.host, stream_);
    } else {
      dispatch::attend(backend_, config_.batch_invariant, attend_params_, plan_.data()->schedules,
                       impl_.workspace);
    }
  }

 private:
  const AttentionConfig& config_;
  const StepPlan& plan_;
  detail::CacheImpl& impl_;
  const LayerInputs& inputs_;
  Stream stream_;
  device::DeviceGuard guard_;
  api::StepShape shape_;
  api::StepBatches batches_;
  kernels::KvPages pages_;
  kernels::AppendParams append_params_;
  kernels::AttendParams attend_params_;
  Backend backend_ = Backend::Auto;
};

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
                       const LayerInputs& inputs, Stream stream) const {
  check_layer_call(plan, cache, layer, cache_config_);
  LayerCall call(config_, plan, cache.impl(), layer, inputs, stream);
  call.check_append();
  call.append();
}

void Attention::attend(const StepPlan& plan, KvCache& cache, std::int32_t layer,
                       const LayerInputs& inputs, const TensorView& out, const TensorView* lse,
                       Stream stream) const {
  check_layer_call(plan, cache, layer, cache_config_);
  LayerCall call(config_, plan, cache.impl(), layer, inputs, stream);
  call.check_attend(out, lse);
  call.attend();
}

void Attention::forward(const StepPlan& plan, KvCache& cache, std::int32_t layer,
                        const LayerInputs& inputs, const TensorView& out, const TensorView* lse,
                        Stream stream) const {
  check_layer_call(plan, cache, layer, cache_config_);
  LayerCall call(config_, plan, cache.impl(), layer, inputs, stream);
  call.check_append();
  call.check_attend(out, lse);
  call.append();
  call.attend();
}

}  // namespace octavo
