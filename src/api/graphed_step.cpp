// SPDX-License-Identifier: Apache-2.0
// Captured steps over our own cache.
#include <octavo/error.h>
#include <octavo/graphed_step.h>

#include <vector>

#include "api/layer_call.h"
#include "base/error.h"
#include "device/gpu.h"

namespace octavo {

namespace detail {

struct GraphedStepImpl {
  CacheImpl* cache = nullptr;
  StepMaxima maxima;
  Backend backend = Backend::Auto;
  device::CapturedWork work;
};

}  // namespace detail

namespace {

void check_layers(const KvCache& cache, std::span<const LayerTensors> layers) {
  const CacheConfig& c = cache.config();
  if (c.device.type != DeviceType::Cuda) {
    if (!device::gpu_report().compiled) {
      throw Error(ErrorCode::NotCompiled,
                  base::mismatch_text("cache.device", "cuda", to_string(c.device.type),
                                      device::gpu_report().why_none));
    }
    base::throw_mismatch("cache.device", "cuda", to_string(c.device.type));
  }
  if (layers.empty() || layers.size() > static_cast<std::size_t>(c.num_layers)) {
    base::throw_mismatch("layers", fmt::format("1 … {} (the cache's)", c.num_layers),
                         layers.size());
  }
}

}  // namespace

GraphedStep::GraphedStep(const Attention& attention, KvCache& cache, const StepMaxima& maxima,
                         std::span<const LayerTensors> layers) {
  check_layers(cache, layers);
  impl_ = std::make_unique<detail::GraphedStepImpl>();
  impl_->cache = &cache.impl();
  impl_->maxima = maxima;
  std::vector<LayerInputs> inputs;
  inputs.reserve(layers.size());
  for (const LayerTensors& layer : layers) {
    inputs.push_back(layer.inputs);
    inputs.back().maxima = &impl_->maxima;
  }
  // All is checked, and what backends prepare is there, before the capture begins.
  std::vector<std::unique_ptr<api::LayerCall>> calls;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto layer = static_cast<std::int32_t>(i);
    api::check_cache(cache, attention.cache_config(), layer);
    calls.push_back(
        std::make_unique<api::LayerCall>(attention, *impl_->cache, layer, inputs[i], Stream{}));
    calls.back()->check_append();
    calls.back()->check_attend(layers[i].out, layers[i].lse ? &*layers[i].lse : nullptr);
  }
  impl_->backend = calls.front()->backend();
  impl_->work = device::CapturedWork(cache.config().device, [&](Stream stream) {
    for (const auto& call : calls) {
      call->append(stream);
      call->attend(stream);
    }
  });
  // What the capture noted of the workspace has not happened.
  impl_->cache->gpu->workspace_used();
}

GraphedStep::~GraphedStep() = default;
GraphedStep::GraphedStep(GraphedStep&&) noexcept = default;
GraphedStep& GraphedStep::operator=(GraphedStep&&) noexcept = default;

void GraphedStep::replay(const StepPlan& plan, Stream stream) {
  detail::CacheImpl& cache = *impl_->cache;
  api::check_begun(plan, cache);
  api::check_within(plan, impl_->maxima);
  const device::DeviceGuard guard(cache.config.device);
  device::check_stream(cache.config.device, stream);
  impl_->work.launch(stream);
  cache.gpu->workspace_used();
}

const StepMaxima& GraphedStep::maxima() const noexcept { return impl_->maxima; }
Backend GraphedStep::backend() const noexcept { return impl_->backend; }

}  // namespace octavo
