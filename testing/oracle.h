// SPDX-License-Identifier: Apache-2.0
// Attention over a key/value cache by definition, in double: what every backend is measured
// against. Written to be read as a text beside oracle.cpp; neither fast nor clever, and apart from
// the library: it knows its enums and nothing else of it.
#pragma once

#include <octavo/attention.h>
#include <octavo/types.h>

#include <cstdint>
#include <span>
#include <vector>

namespace octavo::testkit {

/// The keys (or values) of one sequence in a paged pool [pages, page_size, heads, dim]: position
/// `pos` lies in page pages[pos / page_size], slot pos % page_size.
struct OracleRows {
  std::span<const double> pool;
  std::span<const std::int32_t> pages;
  std::int64_t page_size = 1;
  std::int64_t heads = 1;
  std::int64_t dim = 1;

  /// The elements [dim] of one head at one position.
  [[nodiscard]] const double* at(std::int64_t pos, std::int64_t head) const {
    const std::int64_t page = pages[static_cast<std::size_t>(pos / page_size)];
    const std::int64_t slot = pos % page_size;
    return pool.data() + ((page * page_size + slot) * heads + head) * dim;
  }
};

/// One sequence in one step: its last `num_queries` positions ask, all `kv_len` positions answer.
struct OracleSequence {
  std::span<const double> q;  ///< [num_queries, num_q_heads, head_dim]
  std::int64_t num_queries = 0;
  std::int64_t kv_len = 0;
  OracleRows keys, values;
  const float* sinks = nullptr;         ///< [num_q_heads] or null
  const float* alibi_slopes = nullptr;  ///< [num_q_heads] or null
};

struct OracleResult {
  std::vector<double> out;  ///< [num_queries, num_q_heads, head_dim_v]
  std::vector<double> lse;  ///< [num_queries, num_q_heads], sinks left out
};

/// `config.softmax_scale` 0 is 1 / sqrt(head_dim).
OracleResult attend_by_definition(const AttentionConfig& config, const OracleSequence& sequence);

/// Turns one head [head_dim] in place, as the position asks.
void rotate_by_definition(const Rope& rope, std::int64_t position, std::span<double> head);

}  // namespace octavo::testkit
