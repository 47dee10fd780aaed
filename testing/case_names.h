// SPDX-License-Identifier: Apache-2.0
// How case files spell what Octavo calls by other names: the one place where the two meet.
#pragma once

#include <octavo/attention.h>
#include <octavo/cache.h>
#include <octavo/types.h>

#include <cstdint>
#include <limits>

namespace octavo::testkit {

/// A whole number of the description and the member that it becomes.
template <typename ConfigT, typename ValueT>
struct CaseNumber {
  const char* name;
  ValueT ConfigT::*member;
  std::int64_t low;
  std::int64_t high;
};

template <typename EnumT>
struct CaseWord {
  const char* name;
  EnumT value;
};

inline constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

inline constexpr CaseNumber<AttentionConfig, std::int32_t> kAttentionNumbers[] = {
    {"num_heads", &AttentionConfig::num_q_heads, 1, kMaxInt32},
    {"num_heads_kv", &AttentionConfig::num_kv_heads, 1, kMaxInt32},
    {"head_dim_qk", &AttentionConfig::head_dim, 1, kMaxInt32},
    {"head_dim_v", &AttentionConfig::head_dim_v, 1, kMaxInt32},
};

inline constexpr CaseNumber<CacheConfig, std::int32_t> kCacheNumbers[] = {
    {"page_size", &CacheConfig::page_size, 1, kMaxInt32},
    {"max_batch_size", &CacheConfig::max_num_seqs, 1, kMaxInt32},
};

inline constexpr CaseNumber<CacheConfig, std::int64_t> kCacheLengths[] = {
    {"num_pages", &CacheConfig::num_pages, 1, kMaxInt32},
    {"max_sequence_length", &CacheConfig::max_seq_len, 1, kMaxInt32},
};

inline constexpr CaseWord<Mask> kMasks[] = {{"causal", Mask::Causal}, {"none", Mask::Full}};

inline constexpr CaseWord<CacheKind> kCacheKinds[] = {{"paged", CacheKind::Paged},
                                                      {"contiguous", CacheKind::Contiguous}};

inline constexpr CaseWord<DType> kCaseDtypes[] = {
    {"f32", DType::F32}, {"f16", DType::F16}, {"bf16", DType::BF16}};

inline constexpr CaseWord<TensorFormat> kFormats[] = {
    {"bshd", TensorFormat::Bshd}, {"sbhd", TensorFormat::Sbhd}, {"thd", TensorFormat::Thd}};

/// Compute "same" is spelt as the dtype; this is the other.
inline constexpr const char* kComputeFp8 = "fp8";

}  // namespace octavo::testkit
