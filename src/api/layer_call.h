// SPDX-License-Identifier: Apache-2.0
// One layer call over our own cache, from checks to kernels. Everything is checked before anything
// is written.
#pragma once

#include <octavo/attention.h>
#include <octavo/cache.h>

#include <cstdint>

#include "api/cache_impl.h"
#include "api/layer.h"
#include "device/gpu.h"

namespace octavo::api {

/// Whether the cache is one that the configuration describes, and has the layer. Throws
/// InvalidArgument.
void check_cache(const KvCache& cache, const CacheConfig& expected, std::int32_t layer);

/// Throws InvalidArgument unless the plan is the one that the cache began last.
void check_begun(const StepPlan& plan, const detail::CacheImpl& impl);

class LayerCall {
 public:
  /// The begun step, or, with inputs.maxima, any step within them; then nothing needs to be begun
  /// on a GPU. The arguments outlive the call.
  LayerCall(const Attention& attention, detail::CacheImpl& impl, std::int32_t layer,
            const LayerInputs& inputs, Stream stream);

  void check_append();
  void check_attend(const TensorView& out, const TensorView* lse);
  void append(Stream stream);
  void attend(Stream stream);

  [[nodiscard]] Backend backend() const { return backend_; }

 private:
  const AttentionConfig& config_;
  Backend backend_;  // as asked for, then as chosen
  detail::CacheImpl& impl_;
  const LayerInputs& inputs_;
  device::DeviceGuard guard_;
  StepShape shape_;
  StepBatches batches_;
  kernels::StepLengths lengths_;
  kernels::KvPages pages_;
  kernels::AppendParams append_params_;
  kernels::AttendParams attend_params_;
  bool appends_ = false;
};

}  // namespace octavo::api
