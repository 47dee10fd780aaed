// SPDX-License-Identifier: Apache-2.0
// One step over one layer, built straight from a short description: logical q, K and V are the same
// whatever the page size, cache kind and format are, everything that must not be read holds NaN,
// and outputs hold a canary.
#pragma once

#include <octavo/attention.h>
#include <octavo/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/params.h"

namespace octavo::test {

struct Lengths {
  std::int32_t keys = 0;  // new tokens included
  std::int32_t new_tokens = 0;
};

struct Problem {
  std::vector<Lengths> sequences = {{5, 5}};
  std::int32_t num_q_heads = 2;
  std::int32_t num_kv_heads = 1;
  std::int32_t head_dim = 16;
  std::int32_t head_dim_v = 16;
  DType q_dtype = DType::F32;
  DType kv_dtype = DType::F32;
  DType out_dtype = DType::F32;
  std::int32_t page_size = 16;  // 0: contiguous
  TensorFormat format = TensorFormat::Thd;
  std::int32_t padding_rows = 3;  // of q, out and LSE
  float scale = 0.0F;
  float softcap = 0.0F;
  bool causal = true;
  Window window = {};
  bool sinks = false;
  bool alibi = false;
  std::optional<Rope> rope = {};
  std::vector<std::int32_t> rope_positions = {};  // of all tokens, or none
  double magnitude = 1.0;
  std::int32_t split_tiles = 0;  // 0: no splits
  std::int32_t num_threads = 2;
  std::uint64_t seed = 1;
  std::int32_t skip_query_tokens = 0;  // q begins with this many tokens of the random stream less
  std::int32_t nan_value_key = -1;     // a key of sequence 0 whose V is NaN
};

struct Answer {
  std::vector<float> out;  // [tokens, heads, head_dim_v], packed
  std::vector<float> lse;  // [tokens, heads]
  bool padding_ok = true;  // padding rows of out 0, of LSE -inf, guards untouched
};

enum class Kernel : std::uint8_t { Unfused, Cpu };

Answer run(const Problem& problem, Kernel kernel);

/// The float64 oracle's answer, rounded to float.
Answer expected(const Problem& problem);

/// Empty, or what is wrong: non-finite values first, then the worst element, then relative RMS.
std::string difference(const Answer& got, const Answer& wanted, double tolerance = 1e-5,
                       double rms = 2e-6);

/// Whether every bit of out and LSE agrees.
bool same_bits(const Answer& a, const Answer& b);

}  // namespace octavo::test
