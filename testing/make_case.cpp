// SPDX-License-Identifier: Apache-2.0
// Makes the case of a spec: random tokens, answers by the oracle over a store of its own.
#include "testing/input_error.h"
#include "testing/number.h"
#include "testing/oracle.h"
#include "testing/random.h"
#include "testing/spec.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace octavo::testkit {

namespace {

// The whole past of one sequence, K and V, as one long page each.
struct Past {
  std::vector<double> keys, values;
};

class CaseMaker {
 public:
  explicit CaseMaker(const CaseSpec& spec) : spec_(spec), random_(spec.seed) {
    case_.name = spec.to_string();
    case_.guards = "made from its name";
    case_.dtype = spec.dtype;
    case_.format = spec.format;
    AttentionConfig& a = case_.attention;
    a.num_q_heads = spec.num_q_heads;
    a.num_kv_heads = spec.num_kv_heads;
    a.head_dim = spec.head_dim;
    a.head_dim_v = spec.head_dim_v == 0 ? spec.head_dim : spec.head_dim_v;
    a.softmax_scale = spec.scale != 0.0F
                          ? spec.scale
                          : static_cast<float>(1.0 / std::sqrt(static_cast<double>(a.head_dim)));
    a.mask = spec.mask;
    a.window = spec.window;
    a.softcap = spec.softcap;
    case_.tolerance = tolerance_of(spec.dtype, Compute::Same);
    widen_for_large_logits();
    if (spec.sinks) {
      case_.sinks.emplace(DType::F32, std::vector<std::int64_t>{a.num_q_heads});
      random_.fill_normal(*case_.sinks);
    }
    if (spec.alibi) {
      case_.alibi_slopes.emplace(DType::F32, std::vector<std::int64_t>{a.num_q_heads});
      for (std::int32_t head = 0; head < a.num_q_heads; ++head) {
        case_.alibi_slopes->set(head, std::exp2(-8.0 * (head + 1) / a.num_q_heads));
      }
    }
  }

  Case make() {
    for (std::int64_t step_idx = 0; step_idx < spec_.num_steps; ++step_idx) {
      CaseStep step;
      if (spec_.life && step_idx > 0) disturb(step);
      list_sequences(step_idx, step);
      lives_.apply(step);
      fill(step);
      for (const auto& [id, length] : lives_.lengths()) longest_ = std::max(longest_, length);
      most_ = std::max(most_, static_cast<std::int64_t>(lives_.lengths().size()));
      case_.steps.push_back(std::move(step));
    }
    CacheConfig& cache = case_.cache;
    cache.kind = spec_.kind;
    cache.num_kv_heads = case_.attention.num_kv_heads;
    cache.head_dim = case_.attention.head_dim;
    cache.head_dim_v = case_.attention.head_dim_v;
    cache.dtype = spec_.dtype;
    cache.max_num_seqs = static_cast<std::int32_t>(most_);
    cache.max_seq_len = longest_;
    cache.page_size = spec_.page_size;
    // A page for each sequence beyond the full ones leaves room for the copies that forks cost.
    cache.num_pages = spec_.num_pages != 0
                          ? spec_.num_pages
                          : most_ * ((longest_ + spec_.page_size - 1) / spec_.page_size + 1);
    return std::move(case_);
  }

 private:
  // The table of tolerances is for logits of order 1. A logit is a float32 sum whose terms add up
  // to about sqrt(head_dim) * magnitude^2, scaled; two roundings of that size move the softmax by
  // as much, relatively.
  void widen_for_large_logits() {
    if (spec_.magnitude <= 1.0) return;
    const double logit_error =
        2.0 * 0x1p-23 * std::sqrt(spec_.head_dim) * spec_.magnitude * spec_.magnitude;
    case_.tolerance.atol += logit_error;
    case_.tolerance.rtol += logit_error;
    case_.tolerance.rms += logit_error / 5.0;
  }

  // Ends, forks and cuts back a few sequences.
  void disturb(CaseStep& step) {
    std::vector<SequenceId> ids;
    for (const auto& [id, length] : lives_.lengths()) ids.push_back(id);
    if (ids.size() > 1 && random_.integer(0, 3) == 0) {
      const auto victim =
          ids.begin() + random_.integer(0, static_cast<std::int64_t>(ids.size()) - 1);
      step.release.push_back(*victim);
      ids.erase(victim);
    }
    std::map<SequenceId, std::int64_t> lengths = lives_.lengths();
    const auto pick = [&] {
      return ids[static_cast<std::size_t>(
          random_.integer(0, static_cast<std::int64_t>(ids.size()) - 1))];
    };
    if (!ids.empty() && random_.integer(0, 1) == 0) {
      const SequenceId source = pick();
      step.fork.push_back({source, next_id_});
      lengths[next_id_] = lengths[source];
      ids.push_back(next_id_++);
    }
    if (!ids.empty() && random_.integer(0, 1) == 0) {
      const SequenceId id = pick();
      step.truncate.push_back({id, random_.integer(0, lengths[id])});
    }
  }

  void list_sequences(std::int64_t step_idx, CaseStep& step) {
    Lives after = lives_;
    after.apply(step);
    if (step_idx == 0) {
      for (std::int64_t b = 0; b < spec_.num_seqs; ++b) {
        // The first is as long as asked, the others ragged.
        const std::int64_t tokens = b == 0 ? spec_.past : random_.integer(0, spec_.past);
        step.sequences.push_back({next_id_++, tokens});
      }
      return;
    }
    for (const auto& [id, length] : after.lengths()) {
      if (spec_.life && random_.integer(0, 4) == 0) continue;
      const std::int64_t low = std::min<std::int64_t>(1, spec_.new_tokens);
      const std::int64_t tokens = spec_.life ? random_.integer(0, spec_.new_tokens)
                                             : random_.integer(low, spec_.new_tokens);
      step.sequences.push_back({id, step.sequences.empty() ? spec_.new_tokens : tokens});
    }
    if (spec_.life && random_.integer(0, 2) == 0) {
      step.sequences.push_back({next_id_++, random_.integer(0, spec_.past)});
    }
    for (std::size_t i = step.sequences.size(); spec_.life && i > 1; --i) {
      std::swap(step.sequences[i - 1], step.sequences[static_cast<std::size_t>(
                                           random_.integer(0, static_cast<std::int64_t>(i) - 1))]);
    }
  }

  // Forks and cuts of the oracle's own store, then tokens and answers.
  void fill(CaseStep& step) {
    const AttentionConfig& a = case_.attention;
    const std::int64_t key_width = std::int64_t{a.num_kv_heads} * a.head_dim;
    const std::int64_t value_width = std::int64_t{a.num_kv_heads} * a.head_dim_v;
    for (const SequenceId id : step.release) store_.erase(id);
    for (const auto& fork : step.fork) store_[fork.to] = store_[fork.from];
    for (const auto& cut : step.truncate) {
      store_[cut.id].keys.resize(static_cast<std::size_t>(cut.length * key_width));
      store_[cut.id].values.resize(static_cast<std::size_t>(cut.length * value_width));
    }
    const auto tensor = [&](DType dtype, std::int32_t heads, std::int32_t dim) {
      return HostTensor(dtype, shape_of(step, case_.format, heads, dim));
    };
    step.q = tensor(case_.dtype, a.num_q_heads, a.head_dim);
    step.k = tensor(case_.dtype, a.num_kv_heads, a.head_dim);
    step.v = tensor(case_.dtype, a.num_kv_heads, a.head_dim_v);
    step.out = tensor(DType::F32, a.num_q_heads, a.head_dim_v);
    for (std::int64_t i = 0; i < step.out.size(); ++i) step.out.set(i, 0.0);
    step.lse.emplace(DType::F32, std::vector<std::int64_t>{total_new_tokens(step), a.num_q_heads});

    std::int64_t packed_start = 0;
    for (std::size_t b = 0; b < step.sequences.size(); ++b) {
      fill_sequence(step, static_cast<std::int64_t>(b), packed_start);
      packed_start += step.sequences[b].new_tokens;
    }
  }

  void fill_sequence(CaseStep& step, std::int64_t seq_idx, std::int64_t packed_start) {
    const AttentionConfig& a = case_.attention;
    const SequenceStep& line = step.sequences[static_cast<std::size_t>(seq_idx)];
    Past& past = store_[line.id];
    std::vector<double> q;
    // A row of random numbers, into the tensor and, as rounded there, behind `kept`.
    const auto fill_row = [&](HostTensor& tensor, std::int64_t token, std::int64_t width,
                              double magnitude, std::vector<double>& kept) {
      const std::int64_t row = row_of(case_.format, tensor.shape(), seq_idx, token, packed_start);
      for (std::int64_t i = row * width; i < (row + 1) * width; ++i) {
        tensor.set(i, magnitude * random_.normal());
        kept.push_back(tensor.get(i));
      }
    };
    for (std::int64_t token = 0; token < line.new_tokens; ++token) {
      fill_row(step.q, token, std::int64_t{a.num_q_heads} * a.head_dim, spec_.magnitude, q);
      fill_row(step.k, token, std::int64_t{a.num_kv_heads} * a.head_dim, spec_.magnitude,
               past.keys);
      fill_row(step.v, token, std::int64_t{a.num_kv_heads} * a.head_dim_v, 1.0, past.values);
    }

    const std::int64_t kv_len = lives_.lengths().at(line.id);
    const std::vector<std::int32_t> only_page = {0};
    OracleSequence sequence;
    sequence.q = q;
    sequence.num_queries = line.new_tokens;
    sequence.kv_len = kv_len;
    sequence.keys = {past.keys, only_page, std::max<std::int64_t>(kv_len, 1), a.num_kv_heads,
                     a.head_dim};
    sequence.values = {past.values, only_page, std::max<std::int64_t>(kv_len, 1), a.num_kv_heads,
                       a.head_dim_v};
    const auto floats = [](const std::optional<HostTensor>& tensor) {
      return tensor ? reinterpret_cast<const float*>(tensor->data()) : nullptr;
    };
    sequence.sinks = floats(case_.sinks);
    sequence.alibi_slopes = floats(case_.alibi_slopes);
    const OracleResult result = attend_by_definition(a, sequence);

    const std::int64_t width = std::int64_t{a.num_q_heads} * a.head_dim_v;
    for (std::int64_t token = 0; token < line.new_tokens; ++token) {
      const std::int64_t row = row_of(case_.format, step.out.shape(), seq_idx, token, packed_start);
      for (std::int64_t i = 0; i < width; ++i) {
        step.out.set(row * width + i, result.out[static_cast<std::size_t>(token * width + i)]);
      }
      for (std::int64_t head = 0; head < a.num_q_heads; ++head) {
        step.lse->set((packed_start + token) * a.num_q_heads + head,
                      result.lse[static_cast<std::size_t>(token * a.num_q_heads + head)]);
      }
    }
  }

  const CaseSpec spec_;
  Random random_;
  Case case_;
  Lives lives_;
  std::map<SequenceId, Past> store_;
  SequenceId next_id_ = 0;
  std::int64_t longest_ = 1;
  std::int64_t most_ = 1;
};

}  // namespace

Case make_case(const CaseSpec& spec) { return CaseMaker(spec).make(); }

}  // namespace octavo::testkit
