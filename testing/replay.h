// SPDX-License-Identifier: Apache-2.0
// Repeats a case on a backend, over the public API alone, and compares.
#pragma once

#include "testing/case.h"
#include "testing/compare.h"
#include "testing/host_tensor.h"

#include <octavo/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace octavo::testkit {

struct ReplayOptions {
  Backend backend = Backend::Auto;
  Device device = {};  ///< Where cache and tensors are.
  std::int32_t num_threads = 0;
  std::optional<CacheKind> kind;          ///< Instead of the case's; as many pages as needed.
  std::optional<std::int32_t> page_size;  ///< Likewise.
  std::optional<DType> out_dtype;         ///< Instead of the dtype of q.
  bool batch_invariant = false;
  std::uint64_t scramble = 0;  ///< Not 0: hands the pages out in an order that this seeds.
  bool poison = true;          ///< NaN in every slot that holds no token.
  bool in_halves = false;      ///< Calls append, then attend, instead of forward.
  bool callers_cache = false;  ///< By the functions for a caller's cache, over the same pages.
  bool keep_outputs = false;
};

enum class Verdict : std::uint8_t {
  Pass,
  Differs,  ///< From the right answer; or a buffer was written that must not be.
  Unmet,    ///< A plan or a fork lacked pages, sequences or length.
  Refused,  ///< The backend can't run it; `reason` lists what is missing.
  Invalid,  ///< The library takes the configuration to be wrong, or has not the memory for it.
  Broken,   ///< The library failed at something it had accepted.
};

const char* to_string(Verdict verdict);

struct ReplayResult {
  Verdict verdict = Verdict::Pass;
  std::string reason;               ///< One line; empty when all passes.
  Backend backend = Backend::Auto;  ///< The one that ran.
  std::int64_t steps = 0;           ///< Steps that were replayed to their end.
  Comparison comparison;
  std::vector<HostTensor> outs, lses;  ///< With keep_outputs: step by step, layer by layer.
};

/// Replays a case. Never throws but for std::bad_alloc.
ReplayResult replay(const Case& value, const ReplayOptions& options = {});

/// Replays cases of the same steps and configuration as the layers of one cache.
ReplayResult replay_layers(std::span<const Case> layers, const ReplayOptions& options = {});

}  // namespace octavo::testkit
