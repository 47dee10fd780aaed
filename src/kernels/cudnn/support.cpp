// SPDX-License-Identifier: Apache-2.0
#include "kernels/cudnn/support.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/cudnn/fused.h"
#include "kernels/cudnn/library.h"
#include "kernels/cudnn/sizes.h"

namespace octavo::kernels::fused {
namespace {

using Query = SupportQuery;

struct Rule {
  bool (*needed)(const Query&);
  bool (*ok)(const Query&);
  std::string (*name)(const Query&);
};

bool always(const Query& /*query*/) { return true; }
bool never(const Query& /*query*/) { return false; }

bool is_half(DType dtype) { return dtype == DType::F16 || dtype == DType::BF16; }

bool found_with_gpu(const Query& q) { return q.cudnn_version >= kOldestCudnn && q.sm > 0; }

// A step of which every sequence gets few tokens goes without ragged offsets.
bool needs_offsets(const Query& q) {
  return q.format == TensorFormat::Thd && q.q_len > kMaxTokensAsRows;
}

bool has_window(const Query& q) { return q.window_left >= 0 || q.window_right >= 0; }

constexpr std::int32_t kThdBelowHopper = 91801;

constexpr std::array kRules = {
    Rule{always, [](const Query& q) { return q.compiled; },
         [](const Query& q) {
           return q.compiled ? std::string("compiled into this build")
                             : fmt::format("compiled into this build ({})", why_not_compiled());
         }},
    Rule{always, [](const Query& q) { return q.cudnn_version >= kOldestCudnn; },
         [](const Query& q) {
           const std::string found = q.cudnn_version > 0       ? version_text(q.cudnn_version)
                                     : q.cudnn_why_not.empty() ? std::string("none")
                                                               : q.cudnn_why_not;
           return fmt::format("cuDNN {} or newer (found: {})", version_text(kOldestCudnn), found);
         }},
    Rule{[](const Query& q) { return q.cudnn_version == 91000 || q.cudnn_version == 91001; }, never,
         [](const Query&) {
           return std::string(
               "a cuDNN without the faults of 9.10.0 and 9.10.1 in 16-bit attention");
         }},
    Rule{always, [](const Query& q) { return q.sm >= 80; },
         [](const Query& q) {
           return q.sm > 0 ? fmt::format("sm80 or newer (found: sm{})", q.sm)
                           : std::string("sm80 or newer (found: no GPU)");
         }},
    Rule{
        [](const Query& q) { return q.sm == 89; }, never,
        [](const Query&) { return std::string("attention over a cache on sm89 (a cuDNN fault)"); }},
    Rule{[](const Query& q) { return q.sm >= 120; }, never,
         [](const Query& q) {
           return fmt::format("attention over a cache on sm{} (a cuDNN fault)", q.sm);
         }},
    Rule{always, [](const Query& q) { return is_half(q.cache_dtype); },
         [](const Query& q) { return fmt::format("cache dtype {}", to_string(q.cache_dtype)); }},
    Rule{[](const Query& q) { return q.q_dtype.has_value(); },
         [](const Query& q) { return *q.q_dtype == q.cache_dtype; },
         [](const Query& q) {
           return fmt::format("q dtype {} over a cache of {}", to_string(*q.q_dtype),
                              to_string(q.cache_dtype));
         }},
    Rule{[](const Query& q) { return q.out_dtype.has_value(); },
         [](const Query& q) { return *q.out_dtype == q.cache_dtype; },
         [](const Query& q) {
           return fmt::format("out dtype {} over a cache of {}", to_string(*q.out_dtype),
                              to_string(q.cache_dtype));
         }},
    Rule{[](const Query& q) { return q.compute != Compute::Same; }, never,
         [](const Query& q) { return fmt::format("compute {}", to_string(q.compute)); }},
    Rule{always, [](const Query& q) { return q.head_dim % 8 == 0 && q.head_dim_v % 8 == 0; },
         [](const Query& q) {
           return fmt::format("head dims {} and {} (multiples of 8)", q.head_dim, q.head_dim_v);
         }},
    Rule{always, [](const Query& q) { return std::max(q.head_dim, q.head_dim_v) <= 256; },
         [](const Query& q) {
           return fmt::format("head dims {} and {} (at most 256)", q.head_dim, q.head_dim_v);
         }},
    Rule{needs_offsets,
         [](const Query& q) { return q.sm >= 90 || q.cudnn_version >= kThdBelowHopper; },
         [](const Query& q) {
           return fmt::format("thd with {} tokens a sequence on sm{} (convert to bshd)", q.q_len,
                              q.sm);
         }},
    Rule{[](const Query& q) {
           return q.cudnn_version == 91400 && q.window_left >= 0 && !q.causal &&
                  (q.kv_len == 0 || q.kv_len > 1024);
         },
         never,
         [](const Query&) {
           return std::string(
               "a cuDNN without the fault of 9.14.0 in windows without a causal mask over 1024 "
               "keys");
         }},
    Rule{has_window, found_with_gpu,
         [](const Query& q) {
           return fmt::format("window ({}, {})", q.window_left, q.window_right);
         }},
    Rule{[](const Query& q) { return q.softcap; }, never,
         [](const Query&) { return std::string("softcap"); }},
    Rule{[](const Query& q) { return q.alibi; }, never,
         [](const Query&) { return std::string("ALiBi (cuDNN has it without padding alone)"); }},
    Rule{[](const Query& q) { return q.sinks; }, never,
         [](const Query&) { return std::string("sinks (cuDNN has none for a single query)"); }},
    Rule{[](const Query& q) { return q.rotates_q; }, never,
         [](const Query&) { return std::string("RoPE of q within the call"); }},
    Rule{[](const Query& q) { return q.batch_invariant; }, never,
         [](const Query&) { return std::string("batch-invariant results"); }},
    Rule{[](const Query& q) { return !q.dense_rows; }, never,
         [](const Query&) { return std::string("a last axis with a stride other than 1"); }},
    Rule{[](const Query& q) { return !q.aligned; }, never,
         [](const Query&) {
           return std::string("addresses and strides that are no multiples of 16 bytes");
         }},
    Rule{[](const Query& q) { return !q.whole_slot_pages; }, never,
         [](const Query&) {
           return std::string("pages that start no whole number of slots apart");
         }},
};

bool is_aligned(const void* data, std::int64_t elements) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && elements % 8 == 0;
}

}  // namespace

std::vector<SupportRow> support_rows(const SupportQuery& query) {
  std::vector<SupportRow> rows;
  for (const Rule& rule : kRules) {
    if (rule.needed(query)) rows.push_back({rule.name(query), rule.ok(query)});
  }
  return rows;
}

bool supported(const SupportQuery& query) {
  return std::all_of(kRules.begin(), kRules.end(),
                     [&](const Rule& rule) { return !rule.needed(query) || rule.ok(query); });
}

bool clears_empty_rows(std::int32_t version, std::int32_t sm) {
  constexpr std::array kSeenVersions = {91400, 91900};
  constexpr std::int32_t kSeenSm = 90;
  return sm == kSeenSm &&
         std::find(kSeenVersions.begin(), kSeenVersions.end(), version) != kSeenVersions.end();
}

bool is_compiled() {
#if defined(OCTAVO_HAVE_CUDNN)
  return true;
#else
  return false;
#endif
}

const char* why_not_compiled() {
#if defined(OCTAVO_HAVE_CUDNN)
  return "";
#elif defined(OCTAVO_WHY_NO_CUDNN)
  return OCTAVO_WHY_NO_CUDNN;
#else
  return "built without CUDA";
#endif
}

bool is_slow(std::int32_t q_len, std::int64_t kv_len) {
  constexpr std::int32_t kFullTile = 64;
  constexpr std::int64_t kLong = 1024;
  return q_len > 1 && q_len < kFullTile && kv_len >= kLong;
}

void describe(const AttendParams& params, SupportQuery& query) {
  const KvPages& kv = params.kv;
  query.cache_dtype = kv.dtype;
  query.q_dtype = params.q_dtype;
  query.out_dtype = params.out_dtype;
  query.head_dim = params.head_dim;
  query.head_dim_v = params.head_dim_v;
  if (params.q_layout.ragged) query.format = TensorFormat::Thd;
  query.causal = params.causal;
  query.window_left = params.window_left;
  query.window_right = params.window_right;
  query.softcap = params.softcap != 0.0F;
  query.alibi = params.alibi_slopes != nullptr;
  query.sinks = params.sinks != nullptr;
  query.rotates_q = params.rope.rotary_dim > 0;
  const TokenLayout& q = params.q_layout;
  const TokenLayout& out = params.out_layout;
  query.dense_rows =
      q.dim_stride == 1 && out.dim_stride == 1 && kv.k.dim_stride == 1 && kv.v.dim_stride == 1;
  const auto tokens_aligned = [](const void* data, const TokenLayout& layout) {
    return is_aligned(
        data, layout.token_stride | layout.head_stride | (layout.ragged ? 0 : layout.batch_stride));
  };
  const auto pages_aligned = [](const PagedTensor& tensor) {
    return is_aligned(tensor.data, tensor.page_stride | tensor.slot_stride | tensor.head_stride);
  };
  query.aligned = tokens_aligned(params.q, q) && tokens_aligned(params.out, out) &&
                  pages_aligned(kv.k) && pages_aligned(kv.v);
  query.whole_slot_pages = can_cut(kv);
}

}  // namespace octavo::kernels::fused
