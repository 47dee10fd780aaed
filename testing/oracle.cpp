// SPDX-License-Identifier: Apache-2.0
#include "testing/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace octavo::testkit {

namespace {

bool sees(const AttentionConfig& config, std::int64_t query, std::int64_t key) {
  if (config.mask == Mask::Causal && key > query) return false;
  if (config.window.left >= 0 && key < query - config.window.left) return false;
  if (config.window.right >= 0 && key > query + config.window.right) return false;
  return true;
}

// The logit of one query head and one key: scale, softcap, ALiBi, in this order.
double logit(const AttentionConfig& config, const OracleSequence& sequence, std::int64_t query_idx,
             std::int64_t head, std::int64_t position, std::int64_t key) {
  const std::int64_t dim = sequence.keys.dim;
  const std::int64_t kv_head = head / (config.num_q_heads / config.num_kv_heads);
  const double scale = config.softmax_scale == 0.0F ? 1.0 / std::sqrt(static_cast<double>(dim))
                                                    : static_cast<double>(config.softmax_scale);
  const double* q = sequence.q.data() + (query_idx * config.num_q_heads + head) * dim;
  const double* k = sequence.keys.at(key, kv_head);
  double dot = 0.0;
  for (std::int64_t i = 0; i < dim; ++i) dot += q[i] * k[i];
  double s = dot * scale;
  if (config.softcap > 0.0F) {
    const auto cap = static_cast<double>(config.softcap);
    s = cap * std::tanh(s / cap);
  }
  if (sequence.alibi_slopes != nullptr) {
    s -= static_cast<double>(sequence.alibi_slopes[head]) *
         static_cast<double>(std::abs(position - key));
  }
  return s;
}

}  // namespace

OracleResult attend_by_definition(const AttentionConfig& config, const OracleSequence& sequence) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::int64_t heads = config.num_q_heads;
  const std::int64_t dim_v = sequence.values.dim;
  OracleResult result;
  result.out.assign(static_cast<std::size_t>(sequence.num_queries * heads * dim_v), 0.0);
  result.lse.assign(static_cast<std::size_t>(sequence.num_queries * heads), -kInfinity);
  std::vector<double> logits(static_cast<std::size_t>(sequence.kv_len));

  for (std::int64_t query_idx = 0; query_idx < sequence.num_queries; ++query_idx) {
    const std::int64_t position = sequence.kv_len - sequence.num_queries + query_idx;
    for (std::int64_t head = 0; head < heads; ++head) {
      double top = -kInfinity;
      for (std::int64_t key = 0; key < sequence.kv_len; ++key) {
        double& s = logits[static_cast<std::size_t>(key)];
        s = -kInfinity;
        if (sees(config, position, key)) {
          s = logit(config, sequence, query_idx, head, position, key);
        }
        top = std::max(top, s);
      }
      // A row that sees no key keeps its 0 and -inf.
      if (top == -kInfinity) continue;

      double sum = 0.0;
      for (const double s : logits) sum += std::exp(s - top);
      const std::int64_t row = query_idx * heads + head;
      result.lse[static_cast<std::size_t>(row)] = std::log(sum) + top;
      if (sequence.sinks != nullptr)
        sum += std::exp(static_cast<double>(sequence.sinks[head]) - top);

      const std::int64_t kv_head = head / (config.num_q_heads / config.num_kv_heads);
      for (std::int64_t key = 0; key < sequence.kv_len; ++key) {
        // An unseen key's value is not read: it may be anything, NaN too.
        if (!sees(config, position, key)) continue;
        const double weight = std::exp(logits[static_cast<std::size_t>(key)] - top) / sum;
        const double* v = sequence.values.at(key, kv_head);
        double* out = result.out.data() + row * dim_v;
        for (std::int64_t i = 0; i < dim_v; ++i) out[i] += weight * v[i];
      }
    }
  }
  return result;
}

void rotate_by_definition(const Rope& rope, std::int64_t position, std::span<double> head) {
  const auto rotary_dim =
      rope.rotary_dim == 0 ? head.size() : static_cast<std::size_t>(rope.rotary_dim);
  const std::size_t pairs = rotary_dim / 2;
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    double cosine = 0.0;
    double sine = 0.0;
    if (rope.cos != nullptr) {
      const std::size_t entry = static_cast<std::size_t>(position) * pairs + pair;
      cosine = static_cast<double>(rope.cos[entry]);
      sine = static_cast<double>(rope.sin[entry]);
    } else {
      const double exponent = -2.0 * static_cast<double>(pair) / static_cast<double>(rotary_dim);
      const double angle = static_cast<double>(position) * std::pow(rope.base, exponent);
      cosine = std::cos(angle);
      sine = std::sin(angle);
    }
    const bool interleaved = rope.style == RopeStyle::Interleaved;
    double& x = head[interleaved ? 2 * pair : pair];
    double& y = head[interleaved ? 2 * pair + 1 : pair + pairs];
    const double turned_x = x * cosine - y * sine;
    y = x * sine + y * cosine;
    x = turned_x;
  }
}

}  // namespace octavo::testkit
