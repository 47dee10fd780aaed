// SPDX-License-Identifier: Apache-2.0
#include "bench/cases.h"

#include <fmt/format.h>

namespace octavo::bench {

namespace {

struct Heads {
  std::int32_t num_q_heads;
  std::int32_t num_kv_heads;
  std::int32_t head_dim;
};

constexpr Heads kHeads[] = {{32, 8, 128}, {9, 3, 64}};

BenchCase attention_case(CaseKind kind, std::int32_t num_seqs, std::int64_t kv_len,
                         const Heads& heads, DType dtype, std::int32_t page_size) {
  return {kind,           num_seqs, kv_len,   heads.num_q_heads, heads.num_kv_heads,
          heads.head_dim, dtype,    page_size};
}

void add_decodes(bool quick, std::vector<BenchCase>& cases) {
  for (const Heads& heads : kHeads) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      for (const std::int32_t num_seqs : {1, 8, 64}) {
        for (const std::int64_t kv_len : {512, 4096, 32768}) {
          for (const std::int32_t page_size : {16, 1}) {
            if (quick && (kv_len != 4096 || num_seqs == 64)) continue;
            cases.push_back(
                attention_case(CaseKind::Decode, num_seqs, kv_len, heads, dtype, page_size));
          }
        }
      }
    }
  }
}

void add_prefills(bool quick, std::vector<BenchCase>& cases) {
  for (const Heads& heads : kHeads) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      for (const std::int64_t kv_len : {2048, 8192}) {
        if (quick && kv_len != 2048) continue;
        cases.push_back(attention_case(CaseKind::Prefill, 1, kv_len, heads, dtype, 16));
      }
    }
  }
}

void add_plans(std::vector<BenchCase>& cases) {
  constexpr Heads kNone = {1, 1, 1};
  for (const std::int32_t page_size : {16, 1}) {
    for (const std::int32_t num_seqs : {1, 64, 1024}) {
      cases.push_back(
          attention_case(CaseKind::PlanDecode, num_seqs, 512, kNone, DType::F16, page_size));
    }
    for (const std::int32_t num_seqs : {1, 16}) {
      cases.push_back(
          attention_case(CaseKind::PlanPrefill, num_seqs, 2048, kNone, DType::F16, page_size));
    }
  }
}

}  // namespace

std::string BenchCase::name() const {
  switch (kind) {
    case CaseKind::PlanDecode:
      return fmt::format("plan decode b{} s{} page{} q1", num_seqs, kv_len, page_size);
    case CaseKind::PlanPrefill:
      return fmt::format("plan prefill b{} s{} page{}", num_seqs, kv_len, page_size);
    case CaseKind::Decode:
    case CaseKind::Prefill:
      break;
  }
  const bool decode = kind == CaseKind::Decode;
  return fmt::format("{} b{} s{} h{}/{} d{} {} page{}{}", decode ? "decode" : "prefill", num_seqs,
                     kv_len, num_q_heads, num_kv_heads, head_dim, to_string(dtype), page_size,
                     decode ? " q1" : "");
}

bool BenchCase::is_plan() const {
  return kind == CaseKind::PlanDecode || kind == CaseKind::PlanPrefill;
}

std::int64_t BenchCase::new_tokens() const {
  return kind == CaseKind::Decode || kind == CaseKind::PlanDecode ? 1 : kv_len;
}

double BenchCase::flops() const {
  const auto keys = static_cast<double>(kv_len);
  const double seen = new_tokens() == 1 ? keys : keys * (keys + 1.0) / 2.0;
  return 4.0 * num_seqs * num_q_heads * head_dim * seen;
}

std::int64_t BenchCase::bytes() const {
  return 2 * num_seqs * kv_len * num_kv_heads * head_dim * dtype_bytes(dtype);
}

std::vector<BenchCase> all_cases(bool quick) {
  std::vector<BenchCase> cases;
  add_decodes(quick, cases);
  add_prefills(quick, cases);
  add_plans(cases);
  return cases;
}

}  // namespace octavo::bench
