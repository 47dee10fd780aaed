// SPDX-License-Identifier: Apache-2.0
// A case in one line of text, e.g. "b3 q1 s100 hq32 hkv8 d128 p16 bf16 seed7": printable, readable,
// and enough to make the same case again anywhere.
#pragma once

#include "testing/case.h"

#include <octavo/types.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace octavo::testkit {

/// What the words of the line mean; kSpecHelp tells a user.
struct CaseSpec {
  std::int64_t num_seqs = 2;    ///< b
  std::int64_t new_tokens = 1;  ///< q: the most that a sequence brings in each step but the first
  std::int64_t past = 40;       ///< s: the most that a sequence brings in the first step
  std::int64_t num_steps = 3;   ///< steps
  std::int32_t num_q_heads = 4;
  std::int32_t num_kv_heads = 2;
  std::int32_t head_dim = 32;
  std::int32_t head_dim_v = 0;  ///< dv; 0 is head_dim
  std::int32_t page_size = 16;
  std::int64_t num_pages = 0;  ///< pages; 0 is as many as could be needed
  DType dtype = DType::F32;
  TensorFormat format = TensorFormat::Thd;
  CacheKind kind = CacheKind::Paged;
  Mask mask = Mask::Causal;
  Window window = {};    ///< wLEFT,RIGHT
  float softcap = 0.0F;  ///< cap
  float scale = 0.0F;    ///< scale
  bool sinks = false;
  bool alibi = false;
  bool life = false;       ///< Sequences also pause, end, fork and are cut back, at random.
  double magnitude = 1.0;  ///< mag: of q and K
  std::uint64_t seed = 1;

  [[nodiscard]] std::string to_string() const;
  friend bool operator==(const CaseSpec&, const CaseSpec&) = default;
};

/// Errors: InputError for a word that isn't one, a number out of range, or sizes that would make a
/// case of more than 2^31 elements.
CaseSpec parse_spec(std::string_view line);

/// The case, with answers by the oracle. The same spec gives the same case.
Case make_case(const CaseSpec& spec);

/// What words there are, for people.
extern const char* const kSpecHelp;

}  // namespace octavo::testkit
