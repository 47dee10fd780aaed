// SPDX-License-Identifier: Apache-2.0
// The arguments of attention over a caller's cache and of an append to it, read and checked: what
// attend, append_tokens, Workspace.sizes and repeated calls share.
#pragma once

#include <nanobind/nanobind.h>
#include <octavo/attention.h>
#include <octavo/error.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "array.h"
#include "callers_step.h"
#include "layer.h"

namespace octavo::python {

/// The library speaks of its structs; here every field is an argument of its own.
template <typename CallT>
void with_our_names(const CallT& call) {
  try {
    call();
  } catch (const Error& error) {
    std::string_view text = error.what();
    constexpr std::pair<std::string_view, std::string_view> kNames[] = {
        {"cache.k", "k_cache"}, {"cache.v", "v_cache"}, {"cache.", ""}, {"step.", ""}};
    for (const auto& [theirs, ours] : kNames) {
      if (!text.starts_with(theirs)) continue;
      throw Error(error.code(), std::string(ours) + std::string(text.substr(theirs.size())));
    }
    throw;
  }
}

/// The configuration as far as the tensors tell it.
void set_sizes(const Array& q, const KvView& cache, AttentionConfig& config);

/// Optional inputs of a call, as given.
struct ExtraWords {
  nb::handle sinks, alibi_slopes;
  const RopeHolder* rope = nullptr;
  nb::handle positions;
};

/// Where the results go.
struct ResultWords {
  nb::handle out, lse;
  std::optional<LseAxes> lse_axes = std::nullopt;
};

/// Lives as long as the call.
class AttendCall {
 public:
  AttendCall(nb::handle q, const CacheWords& cache, const StepWords& step, nb::handle format,
             const ResultWords& results, const ConfigWords& config, const ExtraWords& extras);
  AttendCall(const AttendCall&) = delete;
  AttendCall& operator=(const AttendCall&) = delete;

  [[nodiscard]] const AttentionConfig& config() const { return config_; }
  [[nodiscard]] const KvView& cache() const { return cache_.view(); }
  [[nodiscard]] const CallersCache& callers_cache() const { return cache_; }
  [[nodiscard]] const StepArrays& step() const { return step_.arrays(); }
  [[nodiscard]] const LayerInputs& inputs() const { return inputs_; }
  [[nodiscard]] const TensorView& out() const { return out_.view(); }
  [[nodiscard]] const TensorView* lse() const { return lse_.view(); }
  [[nodiscard]] Device device() const { return q_.device(); }
  [[nodiscard]] nb::object results() { return lse_.beside(out_.finish()); }

 private:
  AttentionConfig config_;
  LayerInputs inputs_;
  Array q_;
  CallersCache cache_;
  CallersStep step_;
  LayerExtras extras_;
  Result out_;
  LseResult lse_;
};

/// Lives as long as the call and the cache.
class AppendCall {
 public:
  AppendCall(nb::handle k, nb::handle v, const CallersCache& cache, const StepWords& step,
             nb::handle format, const RopeHolder* rope, nb::handle positions,
             std::int32_t num_threads = 0);
  AppendCall(const AppendCall&) = delete;
  AppendCall& operator=(const AppendCall&) = delete;

  [[nodiscard]] const AttentionConfig& config() const { return config_; }
  [[nodiscard]] const StepArrays& step() const { return step_.arrays(); }
  [[nodiscard]] const LayerInputs& inputs() const { return inputs_; }
  [[nodiscard]] Device device() const { return k_.device(); }

 private:
  AttentionConfig config_;
  LayerInputs inputs_;
  Array k_, v_;
  CallersStep step_;
  LayerExtras extras_;
};

}  // namespace octavo::python
