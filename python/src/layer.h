// SPDX-License-Identifier: Apache-2.0
// What all attention calls share: the configuration's keywords, RoPE, and a layer's optional
// inputs.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <octavo/attention.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "array.h"

namespace octavo::python {

/// The Python class Rope: the tables stay the caller's and are kept alive.
class RopeHolder {
 public:
  RopeHolder(nb::handle style, std::int32_t rotary_dim, double base, nb::handle cos,
             nb::handle sin);

  [[nodiscard]] const Rope& rope() const { return rope_; }
  /// Errors: InvalidArgument when there are tables, and on another device.
  void check_device(Device device) const;

 private:
  Rope rope_;
  nb::object kept_tables_;
  Device device_;
};

/// The keywords of an attention's configuration that don't follow from tensors.
struct ConfigWords {
  nb::handle softmax_scale, mask;
  std::pair<std::int64_t, std::int64_t> window;
  double softcap = 0;
  bool batch_invariant = false;
  nb::handle backend, compute;
  std::int32_t num_threads = 0;
};

AttentionConfig config_of(const ConfigWords& words);

/// The inputs of a layer call beside its tensors, checked. Lives as long as the call.
class LayerExtras {
 public:
  /// num_q_heads 0: there is no q, hence neither sinks nor slopes.
  LayerExtras(nb::handle sinks, nb::handle alibi_slopes, const RopeHolder* rope,
              nb::handle positions, std::int64_t num_q_heads, std::int64_t num_tokens,
              Device device);

  void set(LayerInputs& inputs) const;

 private:
  const float* sinks_ = nullptr;
  const float* alibi_slopes_ = nullptr;
  const Rope* rope_ = nullptr;
  Integers positions_;
};

/// An octavo.StepMaxima, or None. Errors: InvalidArgument for what is neither.
std::optional<StepMaxima> maxima_of(nb::handle object);

/// Axes of a token tensor: 3 for thd, 4 else. Errors: InvalidArgument for another rank.
void check_token_rank(std::string_view name, const Array& array, TensorFormat format);

/// The shape of q with head_dim_v at its end.
struct OutShape {
  OutShape(const Array& q, std::int64_t head_dim_v);
  [[nodiscard]] std::span<const std::int64_t> span() const { return {shape, rank}; }

  std::int64_t shape[kMaxRank] = {};
  std::size_t rank = 0;
};

nb::object explanation_of(const Explanation& explanation);

void bind_attention(nb::module_& module);
void bind_callers_cache(nb::module_& module);
void bind_convert(nb::module_& module);
void bind_backends(nb::module_& module);
void bind_call_again(nb::module_& module);
void bind_signature(nb::module_& module);

}  // namespace octavo::python
