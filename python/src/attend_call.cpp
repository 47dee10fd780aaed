// SPDX-License-Identifier: Apache-2.0
#include "attend_call.h"

#include <algorithm>

#include "names.h"

namespace octavo::python {
namespace {

Array token_array(std::string_view name, nb::handle tensor, TensorFormat format) {
  Array array(name, tensor);
  check_token_rank(name, array, format);
  return array;
}

/// The same cache, which an append is to write.
const CallersCache& writable(const CallersCache& cache) {
  cache.require_writable();
  return cache;
}

LseResult lse_result(const ResultWords& words, const Array& q, std::int64_t num_tokens) {
  const std::int64_t heads = q.view().shape[static_cast<std::size_t>(q.view().rank - 2)];
  return words.lse_axes ? LseResult(words.lse, q, num_tokens, heads, *words.lse_axes)
                        : LseResult(words.lse, q, num_tokens, heads);
}

AttentionConfig sized(AttentionConfig config, const Array& q, const KvView& cache) {
  set_sizes(q, cache, config);
  return config;
}

}  // namespace

void set_sizes(const Array& q, const KvView& cache, AttentionConfig& config) {
  const auto extent = [](const TensorView& view, std::int32_t axis) {
    return static_cast<std::int32_t>(
        std::clamp<std::int64_t>(view.shape[static_cast<std::size_t>(axis)], 0, 0x7FFFFFFF));
  };
  config.num_q_heads = extent(q.view(), q.view().rank - 2);
  config.head_dim = extent(q.view(), q.view().rank - 1);
  config.num_kv_heads = extent(cache.k, 2);
  config.head_dim_v = extent(cache.v, 3);
}

AttendCall::AttendCall(nb::handle q, const CacheWords& cache, const StepWords& step,
                       nb::handle format, const ResultWords& results, const ConfigWords& config,
                       const ExtraWords& extras)
    : config_(config_of(config)),
      inputs_{.format = format_named("format", format)},
      q_(token_array("q", q, inputs_.format)),
      cache_(cache),
      step_(step, "q", q_, inputs_.format, cache_),
      extras_(extras.sinks, extras.alibi_slopes, extras.rope, extras.positions,
              sized(config_, q_, cache_.view()).num_q_heads, step_.arrays().num_tokens,
              q_.device()),
      out_("out", results.out, q_, OutShape(q_, cache_.view().v.shape[3]).span()),
      lse_(lse_result(results, q_, step_.arrays().num_tokens)) {
  set_sizes(q_, cache_.view(), config_);
  inputs_.q = q_.view();
  extras_.set(inputs_);
}

AppendCall::AppendCall(nb::handle k, nb::handle v, const CallersCache& cache, const StepWords& step,
                       nb::handle format, const RopeHolder* rope, nb::handle positions,
                       std::int32_t num_threads)
    : inputs_{.format = format_named("format", format)},
      k_(token_array("k", k, inputs_.format)),
      v_("v", v),
      step_(step, "k", k_, inputs_.format, writable(cache)),
      extras_({}, {}, rope, positions, 0, step_.arrays().num_tokens, k_.device()) {
  config_.num_threads = num_threads;
  set_sizes(k_, cache.view(), config_);
  config_.num_q_heads = config_.num_kv_heads;
  inputs_.k = k_.view();
  inputs_.v = v_.view();
  extras_.set(inputs_);
}

}  // namespace octavo::python
