// SPDX-License-Identifier: Apache-2.0
#include "api/layer_call.h"

#include <utility>

#include "base/error.h"
#include "dispatch/run.h"

namespace octavo::api {
namespace {

StepShape shape_of(const detail::CacheImpl& impl, const LayerInputs& inputs) {
  StepShape shape;
  shape.format = inputs.format;
  shape.device = impl.config.device;
  if (inputs.maxima != nullptr) {
    check_maxima(*inputs.maxima);
    shape.num_seqs = inputs.maxima->num_seqs;
    shape.num_tokens = inputs.maxima->num_tokens;
    shape.max_new_tokens = inputs.maxima->max_new_tokens;
    shape.max_kv_len = inputs.maxima->max_kv_len;
    shape.bounded = true;
    if (shape.num_seqs > impl.config.max_num_seqs) {
      base::throw_mismatch("maxima.num_seqs",
                           fmt::format("at most {} (the cache's)", impl.config.max_num_seqs),
                           shape.num_seqs);
    }
    if (shape.max_kv_len > impl.config.max_seq_len) {
      base::throw_mismatch("maxima.max_kv_len",
                           fmt::format("at most {} (the cache's)", impl.config.max_seq_len),
                           shape.max_kv_len);
    }
    return shape;
  }
  shape.num_seqs = impl.begun.num_seqs();
  shape.num_tokens = impl.begun.num_tokens();
  shape.max_new_tokens = impl.begun.max_new_tokens();
  shape.max_kv_len = impl.begun.max_kv_len();
  return shape;
}

StepBatches batches_of(const detail::CacheImpl& impl, const StepShape& shape) {
  if (impl.gpu == nullptr) {
    const kernels::StepBatch batch = impl.begun_host_batch();
    return {batch, batch};
  }
  const kernels::StepBatch batch = impl.gpu->batch(shape.num_seqs, shape.num_tokens);
  if (shape.bounded) return {batch, {}};
  return {batch, impl.begun_host_batch()};
}

/// Of a contiguous cache whose sequences lie one behind the other, as StepLengths says.
std::int32_t first_page_of(const detail::CacheImpl& impl, const StepShape& shape, Stream stream) {
  if (impl.gpu == nullptr || shape.bounded || impl.config.kind != CacheKind::Contiguous) return -1;
  const detail::PlanData& plan = *impl.begun.data();
  // Of a contiguous cache an entry is a sequence's page; sequences without new tokens have none.
  if (plan.entries.empty() || plan.entries.size() != plan.ids.size()) return -1;
  const std::int32_t first = plan.entries[0];
  for (std::size_t b = 0; b < plan.entries.size(); ++b) {
    if (plan.entries[b] != first + static_cast<std::int32_t>(b)) return -1;
  }
  return device::is_captured(stream) ? -1 : first;
}

}  // namespace

void check_cache(const KvCache& cache, const CacheConfig& expected, std::int32_t layer) {
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
}

void check_begun(const StepPlan& plan, const detail::CacheImpl& impl) {
  if (plan.data() == nullptr || plan.data() != impl.begun.data()) {
    base::throw_mismatch("plan", "the one that this cache began last",
                         "another one, or one that was not begun");
  }
}

LayerCall::LayerCall(const Attention& attention, detail::CacheImpl& impl, std::int32_t layer,
                     const LayerInputs& inputs, Stream stream)
    : config_(attention.config()),
      backend_(attention.backend()),
      impl_(impl),
      inputs_(inputs),
      guard_(impl.config.device),
      shape_(shape_of(impl, inputs)),
      batches_(batches_of(impl, shape_)),
      lengths_{.batch = batches_.host, .bounded = shape_.bounded},
      pages_(impl.pages_of_layer(layer)) {
  if (inputs.maxima != nullptr) lengths_.maxima = *inputs.maxima;
  if (impl.gpu != nullptr) device::check_stream(impl.config.device, stream);
  lengths_.first_page = first_page_of(impl, shape_, stream);
  lengths_.one_page_each = impl.config.kind == CacheKind::Contiguous;
}

void LayerCall::check_append() {
  append_params_ = append_params(config_, inputs_, shape_, batches_, pages_);
  appends_ = true;
}

void LayerCall::check_attend(const TensorView& out, const TensorView* lse) {
  attend_params_ = attend_params(config_, inputs_, shape_, batches_, pages_, out, lse);
  if (appends_) {
    check_apart("out", out, "k", inputs_.k);
    check_apart("out", out, "v", inputs_.v);
  }
  dispatch::Request request = attend_request(config_, attend_params_, shape_);
  if (impl_.gpu == nullptr) {
    backend_ = dispatch::choose(backend_, request);
    return;
  }
  backend_ = dispatch::choose_with_workspace(
      backend_, std::move(request), shape_.max_kv_len, [this](Backend backend) {
        return impl_.gpu->workspace_for(backend, attend_params_, lengths_);
      });
}

void LayerCall::append(Stream stream) {
  if (impl_.gpu != nullptr) {
    impl_.gpu->append(append_params_, stream);
  } else {
    dispatch::append(append_params_, impl_.begun.data()->memory);
  }
}

void LayerCall::attend(Stream stream) {
  if (impl_.gpu != nullptr) {
    impl_.gpu->attend(backend_, attend_params_, lengths_, stream);
  } else {
    dispatch::attend(backend_, config_.batch_invariant, attend_params_, impl_.begun.data()->memory,
                     impl_.workspace);
  }
}

}  // namespace octavo::api
