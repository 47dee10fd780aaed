// SPDX-License-Identifier: Apache-2.0
#include "testing/replay.h"

#include "testing/callers_step.h"
#include "testing/device_memory.h"
#include "testing/free_slots.h"
#include "testing/input_error.h"
#include "testing/random.h"

#include <octavo/attention.h>
#include <octavo/cache.h>
#include <octavo/error.h>
#include <octavo/plan.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace octavo::testkit {

namespace {

// A refusal lists every feature it looked at.
constexpr std::size_t kLongestReason = 2000;

// Ends a replay early.
struct Stop {
  Verdict verdict;
  std::string reason;
};

// A tensor of a call where the call wants it: the host's own, or its double on a device.
class Placed {
 public:
  Placed(Device device, HostTensor& tensor) : tensor_(tensor) {
    if (device.type != DeviceType::Cpu) double_.emplace(device, tensor);
  }

  [[nodiscard]] TensorView view() const { return double_ ? double_->view() : tensor_.view(); }
  void bring_back() {
    if (double_) double_->download(tensor_);
  }

 private:
  HostTensor& tensor_;
  std::optional<DeviceTensor> double_;
};

// The same for what may be absent.
class PlacedFloats {
 public:
  PlacedFloats(Device device, const std::optional<HostTensor>& tensor) : tensor_(tensor) {
    if (device.type != DeviceType::Cpu && tensor) double_.emplace(device, *tensor);
  }

  [[nodiscard]] const float* get() const {
    if (!tensor_) return nullptr;
    return double_ ? double_->floats() : reinterpret_cast<const float*>(tensor_->data());
  }

 private:
  const std::optional<HostTensor>& tensor_;
  std::optional<DeviceTensor> double_;
};

CacheConfig cache_config(std::span<const Case> layers, const ReplayOptions& options) {
  CacheConfig config = layers.front().cache;
  config.num_layers = static_cast<std::int32_t>(layers.size());
  config.device = options.device;
  if ((options.kind && *options.kind != config.kind) ||
      (options.page_size && *options.page_size != config.page_size)) {
    config.num_pages = 0;
  }
  if (options.kind) config.kind = *options.kind;
  if (options.page_size) config.page_size = *options.page_size;
  // The worst case, and a page for each sequence that a fork makes part from its source.
  if (config.num_pages == 0 && config.kind == CacheKind::Paged) {
    const std::int64_t pages = (config.max_seq_len + config.page_size - 1) / config.page_size + 1;
    config.num_pages = pages * config.max_num_seqs;
  }
  return config;
}

AttentionConfig attention_config(const Case& value, const ReplayOptions& options) {
  AttentionConfig config = value.attention;
  config.backend = options.backend;
  config.num_threads = options.num_threads;
  config.batch_invariant = options.batch_invariant;
  return config;
}

class Replay {
 public:
  Replay(std::span<const Case> layers, const ReplayOptions& options, ReplayResult& result)
      : layers_(layers),
        options_(options),
        result_(result),
        cache_(cache_config(layers, options)),
        attention_(attention_config(layers.front(), options), cache_.config()),
        free_slots_(cache_),
        callers_(options.device) {}

  void run() {
    if (options_.scramble != 0) scramble();
    const std::size_t num_steps = layers_.front().steps.size();
    for (std::size_t step_idx = 0; step_idx < num_steps; ++step_idx) {
      const StepPlan plan = prepare(layers_.front().steps[step_idx], step_idx);
      if (step_idx == 0) {
        result_.backend = attention_.explain(plan, layers_.front().format).chosen;
      }
      cache_.begin(plan);
      std::optional<CallersStep> callers;
      if (options_.callers_cache) callers.emplace(cache_, plan, callers_);
      for (std::size_t layer = 0; layer < layers_.size(); ++layer)
        run_layer(plan, callers ? &*callers : nullptr, layer, step_idx);
      ++result_.steps;
    }
    const Comparison& comparison = result_.comparison;
    if (comparison.worst.excess > 1.0) {
      throw Stop{Verdict::Differs, comparison.worst.to_string()};
    }
    if (!comparison.rms_ok) {
      throw Stop{Verdict::Differs, fmt::format("relative RMS: wanted at most {:.3g}, got {:.3g}",
                                               layers_.front().tolerance.rms, comparison.rms)};
    }
  }

 private:
  // Takes all pages, one by one for random sequences, and gives them back in random order.
  void scramble() {
    Random random(options_.scramble);
    const CacheConfig& config = cache_.config();
    std::vector<SequenceId> ids;
    while (true) {
      const SequenceId id = random.integer(1, config.max_num_seqs);
      const std::int64_t tokens = std::min<std::int64_t>(config.page_size, config.max_seq_len);
      const PlanOutcome outcome = cache_.plan({{id, tokens}});
      if (!outcome) break;
      cache_.begin(outcome.plan());
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
    for (const SequenceId id : ids) cache_.release(id);
  }

  // Release, fork, truncate, plan.
  StepPlan prepare(const CaseStep& step, std::size_t step_idx) {
    for (const SequenceId id : step.release) cache_.release(id);
    if (options_.poison) free_slots_.poison();
    for (const CaseStep::Fork& fork : step.fork) {
      const ForkOutcome outcome = cache_.fork(fork.from, fork.to);
      if (!outcome) {
        throw Stop{Verdict::Unmet, fmt::format("step {}, fork of {}: {}", step_idx, fork.from,
                                               outcome.shortage().to_string())};
      }
    }
    for (const CaseStep::Truncate& cut : step.truncate) cache_.truncate(cut.id, cut.length);
    if (options_.poison && cache_.config().kind == CacheKind::Paged) free_slots_.poison();
    check_length(step, step_idx);
    const PlanOutcome outcome = cache_.plan(step.sequences);
    if (!outcome) {
      throw Stop{Verdict::Unmet,
                 fmt::format("step {}: {}", step_idx, outcome.shortage().to_string())};
    }
    free_slots_.planned(outcome.plan());
    return outcome.plan();
  }

  // A count that the maximum alone rules out is an error to the library, but to a case no other
  // than a plan that can't be met.
  void check_length(const CaseStep& step, std::size_t step_idx) const {
    for (const SequenceStep& sequence : step.sequences) {
      if (sequence.new_tokens > cache_.config().max_seq_len) {
        throw Stop{Verdict::Unmet,
                   fmt::format("step {}, sequence {}: wanted at most {} tokens, got {}", step_idx,
                               sequence.id, cache_.config().max_seq_len, sequence.new_tokens)};
      }
    }
  }

  void run_layer(const StepPlan& plan, CallersStep* callers, std::size_t layer,
                 std::size_t step_idx) {
    const Case& value = layers_[layer];
    const CaseStep& step = value.steps[step_idx];
    HostTensor q = step.q;
    HostTensor k = step.k;
    HostTensor v = step.v;
    HostTensor out(options_.out_dtype.value_or(value.dtype), step.out.shape());
    HostTensor lse(DType::F32, {total_new_tokens(step), value.attention.num_q_heads});
    Placed placed_q(options_.device, q);
    Placed placed_k(options_.device, k);
    Placed placed_v(options_.device, v);
    Placed placed_out(options_.device, out);
    Placed placed_lse(options_.device, lse);
    const PlacedFloats sinks(options_.device, value.sinks);
    const PlacedFloats slopes(options_.device, value.alibi_slopes);
    LayerInputs inputs;
    inputs.q = placed_q.view();
    inputs.k = placed_k.view();
    inputs.v = placed_v.view();
    inputs.format = value.format;
    inputs.sinks = sinks.get();
    inputs.alibi_slopes = slopes.get();
    const TensorView out_view = placed_out.view();
    const TensorView lse_view = placed_lse.view();
    const auto layer_idx = static_cast<std::int32_t>(layer);
    if (callers != nullptr) {
      callers->run(attention_.config(), layer_idx, inputs, out_view, &lse_view);
    } else if (options_.in_halves) {
      attention_.append(plan, cache_, layer_idx, inputs);
      attention_.attend(plan, cache_, layer_idx, inputs, out_view, &lse_view);
    } else {
      attention_.forward(plan, cache_, layer_idx, inputs, out_view, &lse_view);
    }
    for (Placed* placed : {&placed_q, &placed_k, &placed_v, &placed_out, &placed_lse}) {
      placed->bring_back();
    }
    if (!out.guards_intact() || !lse.guards_intact()) {
      throw Stop{Verdict::Differs, fmt::format("step {}: wanted writes inside the outputs alone, "
                                               "got some beside them",
                                               step_idx)};
    }
    if (!(q == step.q) || !(k == step.k) || !(v == step.v)) {
      throw Stop{Verdict::Differs,
                 fmt::format("step {}: wanted q, k and v untouched, got them changed", step_idx)};
    }
    compare_step(value, static_cast<std::int64_t>(step_idx), out, lse, result_.comparison);
    if (options_.keep_outputs) {
      result_.outs.push_back(std::move(out));
      result_.lses.push_back(std::move(lse));
    }
  }

  std::span<const Case> layers_;
  const ReplayOptions& options_;
  ReplayResult& result_;
  KvCache cache_;
  Attention attention_;
  FreeSlots free_slots_;
  CallersWorkspace callers_;
};

Verdict verdict_of(ErrorCode code, bool running) {
  switch (code) {
    case ErrorCode::Unsupported:
    case ErrorCode::NotCompiled:
      return Verdict::Refused;
    case ErrorCode::InvalidArgument:
    case ErrorCode::OutOfMemory:
      return running ? Verdict::Broken : Verdict::Invalid;
    case ErrorCode::DeviceFailure:
    case ErrorCode::Internal:
      break;
  }
  return Verdict::Broken;
}

}  // namespace

const char* to_string(Verdict verdict) {
  switch (verdict) {
    case Verdict::Pass:
      return "pass";
    case Verdict::Differs:
      return "fail";
    case Verdict::Unmet:
      return "unmet";
    case Verdict::Refused:
      return "refused";
    case Verdict::Invalid:
      return "invalid";
    case Verdict::Broken:
      break;
  }
  return "broken";
}

ReplayResult replay_layers(std::span<const Case> layers, const ReplayOptions& options) {
  ReplayResult result;
  result.backend = options.backend;
  bool running = false;
  try {
    Replay replay(layers, options, result);
    running = true;
    replay.run();
  } catch (const Stop& stop) {
    result.verdict = stop.verdict;
    result.reason = stop.reason;
  } catch (const Error& error) {
    result.verdict = verdict_of(error.code(), running);
    result.reason = printable(error.what(), kLongestReason);
  }
  return result;
}

ReplayResult replay(const Case& value, const ReplayOptions& options) {
  return replay_layers({&value, 1}, options);
}

}  // namespace octavo::testkit
