// SPDX-License-Identifier: Apache-2.0
// What cuDNN can do, by its version and by architecture, as rows with names. Asks nothing of a GPU,
// so that any machine can be put in; compiles and runs without CUDA.
#pragma once

#include <octavo/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/params.h"

namespace octavo::kernels::fused {

/// What is asked, and of what. Fields that are not known yet ask for nothing.
struct SupportQuery {
  bool compiled = false;           ///< The build has the frontend's headers.
  std::int32_t sm = 0;             ///< major * 10 + minor; 0: no GPU.
  std::int32_t cudnn_version = 0;  ///< 91900 is 9.19.0; 0: not found.
  std::string cudnn_why_not;       ///< Why not found.
  DType cache_dtype = DType::BF16;
  std::optional<DType> q_dtype;
  std::optional<DType> out_dtype;
  Compute compute = Compute::Same;
  std::int32_t head_dim = 0;
  std::int32_t head_dim_v = 0;
  std::optional<TensorFormat> format;
  std::int32_t q_len = 0;   ///< The most new tokens of a sequence; 0: not known.
  std::int64_t kv_len = 0;  ///< The most keys of a sequence; 0: not known.
  bool causal = true;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  bool softcap = false;
  bool alibi = false;
  bool sinks = false;
  bool rotates_q = false;  ///< RoPE on q as part of the call.
  bool batch_invariant = false;
  bool dense_rows = true;        ///< Last axes of q, out, K and V have stride 1.
  bool aligned = true;           ///< Addresses and strides are multiples of 16 bytes.
  bool whole_slot_pages = true;  ///< Pages start a whole number of slots apart.
};

/// One thing that the call needs.
struct SupportRow {
  std::string name;
  bool ok = false;
};

/// All that the call needs, in a fixed order; what it doesn't need has no row.
std::vector<SupportRow> support_rows(const SupportQuery& query);
bool supported(const SupportQuery& query);

/// Whether cuDNN's decode path gives rows without keys 0, so that nobody has to do it after it.
/// Says what was seen of a version on an architecture.
bool clears_empty_rows(std::int32_t version, std::int32_t sm);

/// Whether the build has the frontend's headers, and, if not, why: "cudnn-frontend headers not
/// found".
bool is_compiled();
const char* why_not_compiled();

/// Where cuDNN is right but slow, so that a chooser takes another backend where one can run it:
/// several new tokens a sequence over long caches, which get no decode path.
bool is_slow(std::int32_t q_len, std::int64_t kv_len);

/// Fills in what `params` say: dtypes, dims, strides, mask, softcap and so on.
void describe(const AttendParams& params, SupportQuery& query);

}  // namespace octavo::kernels::fused
