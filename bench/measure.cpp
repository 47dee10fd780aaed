// SPDX-License-Identifier: Apache-2.0
#include "bench/measure.h"

#include "testing/host_tensor.h"
#include "testing/random.h"

#include <octavo/attention.h>
#include <octavo/cache.h>
#include <octavo/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace octavo::bench {

namespace {

using testkit::HostTensor;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kMostRotation = std::int64_t{4} << 30;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Calls `once`, which returns seconds, until enough time went by.
template <typename OnceT>
double median_seconds(bool quick, std::size_t fewest, OnceT&& once) {
  constexpr std::size_t kMost = 1000;
  const double enough = quick ? 0.2 : 1.0;
  once();  // the first touches memory and wakes threads
  std::vector<double> seconds;
  double total = 0.0;
  while (seconds.size() < fewest || (total < enough && seconds.size() < kMost)) {
    seconds.push_back(once());
    total += seconds.back();
  }
  return median(std::move(seconds));
}

const StepPlan& planned(const PlanOutcome& outcome) {
  if (!outcome) throw std::runtime_error(outcome.shortage().to_string());
  return outcome.plan();
}

// Random numbers once, then copied: a bench's data need not differ from row to row.
HostTensor random_tensor(DType dtype, std::vector<std::int64_t> shape) {
  HostTensor tensor(dtype, std::move(shape));
  testkit::Random random(1);
  const std::int64_t fresh = std::min<std::int64_t>(tensor.size(), 1 << 16);
  for (std::int64_t i = 0; i < fresh; ++i) tensor.set(i, random.normal());
  const std::int64_t width = dtype_bytes(dtype);
  for (std::int64_t done = fresh; done < tensor.size(); done += fresh) {
    const std::int64_t count = std::min(fresh, tensor.size() - done);
    std::memcpy(tensor.data() + done * width, tensor.data(),
                static_cast<std::size_t>(count * width));
  }
  return tensor;
}

CacheConfig cache_config(const BenchCase& value, std::int64_t num_layers) {
  CacheConfig config;
  config.num_layers = static_cast<std::int32_t>(num_layers);
  config.num_kv_heads = value.num_kv_heads;
  config.head_dim = value.head_dim;
  config.dtype = value.dtype;
  config.max_num_seqs = value.num_seqs;
  config.max_seq_len = value.kv_len;
  config.page_size = value.page_size;
  return config;
}

// A cache, an attention, and the tensors of one step.
class Bed {
 public:
  Bed(const BenchCase& value, const Conditions& conditions, std::int64_t num_layers)
      : case_(value),
        cache_(cache_config(value, num_layers)),
        attention_(attention_config(value, conditions), cache_.config()) {}

  // Grows every sequence to `kv_len` tokens, a few at a time in turn, so that their pages lie
  // scattered as those of a server do.
  void fill(std::int64_t kv_len) {
    constexpr std::int64_t kChunk = 64;
    for (std::int64_t done = 0; done < kv_len; done += kChunk) {
      const std::int64_t tokens = std::min(kChunk, kv_len - done);
      const StepPlan plan = begin(tokens);
      make_tensors(plan.num_tokens());
      for (std::int32_t layer = 0; layer < cache_.config().num_layers; ++layer) {
        attention_.append(plan, cache_, layer, inputs_);
      }
    }
  }

  // Seconds of one layer's forward in a step of `new_tokens` each, which is taken back afterwards.
  double step(std::int64_t new_tokens) {
    const StepPlan plan = begin(new_tokens);
    make_tensors(plan.num_tokens());
    const TensorView out = out_.view();
    const Clock::time_point start = Clock::now();
    for (std::int32_t layer = 0; layer < cache_.config().num_layers; ++layer) {
      attention_.forward(plan, cache_, layer, inputs_, out);
    }
    const double seconds = seconds_since(start) / cache_.config().num_layers;
    for (const SequenceId id : plan.ids()) {
      cache_.truncate(id, cache_.length(id) - new_tokens);
    }
    return seconds;
  }

  Backend chosen() {
    const PlanOutcome outcome = cache_.plan({{0, 1}});
    const Backend backend = attention_.explain(planned(outcome), TensorFormat::Thd).chosen;
    cache_.undo(outcome.plan());
    return backend;
  }

 private:
  static AttentionConfig attention_config(const BenchCase& value, const Conditions& conditions) {
    AttentionConfig config;
    config.num_q_heads = value.num_q_heads;
    config.num_kv_heads = value.num_kv_heads;
    config.head_dim = value.head_dim;
    config.backend = conditions.backend;
    config.num_threads = conditions.num_threads;
    return config;
  }

  StepPlan begin(std::int64_t new_tokens) {
    std::vector<SequenceStep> step;
    for (std::int32_t id = 0; id < case_.num_seqs; ++id) step.push_back({id, new_tokens});
    const PlanOutcome outcome = cache_.plan(step);
    cache_.begin(planned(outcome));
    return outcome.plan();
  }

  void make_tensors(std::int64_t tokens) {
    if (tokens == tokens_) return;
    tokens_ = tokens;
    q_ = random_tensor(case_.dtype, {tokens, case_.num_q_heads, case_.head_dim});
    k_ = random_tensor(case_.dtype, {tokens, case_.num_kv_heads, case_.head_dim});
    v_ = random_tensor(case_.dtype, {tokens, case_.num_kv_heads, case_.head_dim});
    out_ = HostTensor(case_.dtype, {tokens, case_.num_q_heads, case_.head_dim});
    inputs_.q = q_.view();
    inputs_.k = k_.view();
    inputs_.v = v_.view();
  }

  const BenchCase& case_;
  KvCache cache_;
  Attention attention_;
  std::int64_t tokens_ = -1;
  HostTensor q_, k_, v_, out_;
  LayerInputs inputs_;
};

Measurement measure_attention(const BenchCase& value, const Conditions& conditions) {
  Measurement result;
  const bool decode = value.kind == CaseKind::Decode;
  const std::int64_t wanted = decode ? 4 * conditions.machine.cache_bytes : 1;
  std::int64_t num_layers = std::max<std::int64_t>((wanted + value.bytes() - 1) / value.bytes(), 1);
  num_layers = std::min(num_layers, std::max<std::int64_t>(kMostRotation / value.bytes(), 1));
  const std::int64_t needed = num_layers * value.bytes();
  if (needed > kMostRotation || needed > conditions.machine.available_bytes / 2) {
    result.skipped = fmt::format(
        "wanted {:.1f} GiB of cache, got at most {:.1f} GiB", static_cast<double>(needed) / 0x1p30,
        std::min(static_cast<double>(kMostRotation),
                 static_cast<double>(conditions.machine.available_bytes) / 2.0) /
            0x1p30);
    return result;
  }
  Bed bed(value, conditions, num_layers);
  bed.fill(value.kv_len - value.new_tokens());
  result.backend = bed.chosen();
  double bandwidth =
      decode ? conditions.dram->bytes_per_s(kReadingSeconds) : conditions.read_bytes_per_s;
  result.seconds =
      median_seconds(conditions.quick, 3, [&] { return bed.step(value.new_tokens()); });
  if (decode) bandwidth = std::max(bandwidth, conditions.dram->bytes_per_s(kReadingSeconds));
  const double reading = static_cast<double>(value.bytes()) / bandwidth;
  const double computing =
      value.flops() /
      (decode && value.dtype == DType::BF16 ? conditions.bf16_flops_per_s : conditions.flops_per_s);
  result.bound_seconds = std::max(reading, computing);
  result.bound = reading > computing ? "DRAM" : "FMA";
  return result;
}

Measurement measure_plan(const BenchCase& value, const Conditions& conditions) {
  KvCache cache(cache_config(value, 1));
  std::vector<SequenceStep> step;
  for (std::int32_t id = 0; id < value.num_seqs; ++id) {
    step.push_back({id, value.kv_len - value.new_tokens()});
  }
  if (value.kind == CaseKind::PlanDecode) cache.begin(planned(cache.plan(step)));
  for (SequenceStep& line : step) line.new_tokens = value.new_tokens();

  Measurement result;
  std::int64_t pages_before = cache.stats().pages_used;
  std::int64_t pages_taken = 0;
  std::int64_t entries = 0;
  result.seconds = median_seconds(conditions.quick, 50, [&] {
    const Clock::time_point start = Clock::now();
    const PlanOutcome outcome = cache.plan(step);
    const double seconds = seconds_since(start);
    pages_taken = cache.stats().pages_used - pages_before;
    entries = static_cast<std::int64_t>(planned(outcome).entries().size());
    cache.undo(outcome.plan());
    return seconds;
  });
  result.bound_seconds = 2e-6 + 20e-9 * value.num_seqs + 20e-9 * static_cast<double>(pages_taken) +
                         1e-9 * static_cast<double>(entries);
  result.bound = "allowed";
  return result;
}

}  // namespace

Measurement measure(const BenchCase& value, const Conditions& conditions) {
  try {
    return value.is_plan() ? measure_plan(value, conditions) : measure_attention(value, conditions);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::Internal) throw;
    Measurement result;
    result.skipped = error.what();
    return result;
  }
}

}  // namespace octavo::bench
