// SPDX-License-Identifier: Apache-2.0
// What is measured, as data.
#pragma once

#include <octavo/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace octavo::bench {

enum class CaseKind : std::uint8_t {
  Decode,       ///< One layer's append and attention of a step of one new token a sequence.
  Prefill,      ///< One layer's append and attention of whole prompts.
  PlanDecode,   ///< KvCache::plan of a step of one new token a sequence.
  PlanPrefill,  ///< KvCache::plan of a step of whole prompts.
};

struct BenchCase {
  CaseKind kind = CaseKind::Decode;
  std::int32_t num_seqs = 1;
  std::int64_t kv_len = 512;  ///< After the step.
  std::int32_t num_q_heads = 32;
  std::int32_t num_kv_heads = 8;
  std::int32_t head_dim = 128;
  DType dtype = DType::F32;
  std::int32_t page_size = 16;

  /// E.g. "decode b64 s4096 h32/8 d128 bf16 page16 q1".
  [[nodiscard]] std::string name() const;
  [[nodiscard]] std::int64_t new_tokens() const;  ///< Of each sequence.
  [[nodiscard]] bool is_plan() const;
  [[nodiscard]] double flops() const;        ///< Of the two products, over what the mask shows.
  [[nodiscard]] std::int64_t bytes() const;  ///< Of K and V, read once.
};

/// All cases, or the few and small ones of a quick look.
std::vector<BenchCase> all_cases(bool quick);

}  // namespace octavo::bench
