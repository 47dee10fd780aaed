// SPDX-License-Identifier: Apache-2.0
// A case: a computation over a cache, some steps long, with the tokens and the right answers.
// Comes from a file (case_file.h) or from a line of text (spec.h), goes to replay.h.
#pragma once

#include "testing/host_tensor.h"

#include <octavo/attention.h>
#include <octavo/cache.h>
#include <octavo/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace octavo::testkit {

/// What happens in one step, in this order: release, fork, truncate, then the step itself.
struct CaseStep {
  struct Fork {
    SequenceId from = 0;
    SequenceId to = 0;
  };
  struct Truncate {
    SequenceId id = 0;
    std::int64_t length = 0;
  };

  std::vector<SequenceId> release;
  std::vector<Fork> fork;
  std::vector<Truncate> truncate;
  std::vector<SequenceStep> sequences;

  HostTensor q, k, v;             ///< In the case's dtype and format; padding holds NaN.
  HostTensor out;                 ///< F32, the format of q; padding is 0.
  std::optional<HostTensor> lse;  ///< F32 [new tokens, num_q_heads], packed in batch order.
};

/// An element passes when |got - wanted| <= atol + rtol * |wanted|; a step passes when also the
/// relative RMS error of its output is at most rms.
struct Tolerance {
  double atol = 0.0;
  double rtol = 0.0;
  double rms = 0.0;
};

struct Case {
  std::string name;
  std::string guards;  ///< What the case is there for, in words.
  DType dtype = DType::F32;
  TensorFormat format = TensorFormat::Thd;
  AttentionConfig attention;  ///< Defaults filled in; backend and threads are the replay's.
  CacheConfig cache;
  std::optional<HostTensor> sinks;         ///< F32 [num_q_heads]
  std::optional<HostTensor> alibi_slopes;  ///< F32 [num_q_heads]
  std::vector<CaseStep> steps;
  Tolerance tolerance;
};

/// The tolerance for results computed in this precision.
Tolerance tolerance_of(DType dtype, Compute compute);

/// Sums of what a step's sequences bring.
std::int64_t total_new_tokens(const CaseStep& step);
std::int64_t longest_new_tokens(const CaseStep& step);

/// The shape of q, k, v or the output: the leading axes as `format` says, then heads and dim.
std::vector<std::int64_t> shape_of(const CaseStep& step, TensorFormat format, std::int64_t heads,
                                   std::int64_t dim);

/// The row (of heads) of token `token_idx` of batch row `seq_idx` in a tensor of `shape`.
/// `packed_start` is the number of new tokens before that sequence.
std::int64_t row_of(TensorFormat format, const std::vector<std::int64_t>& shape,
                    std::int64_t seq_idx, std::int64_t token_idx, std::int64_t packed_start);

/// The lengths of the live sequences as a case's steps go by; what a case may not ask for is found
/// here. Errors (of each call): InputError.
class Lives {
 public:
  /// All four parts of a step, in their order.
  void apply(const CaseStep& step);

  /// Tokens of each live sequence.
  [[nodiscard]] const std::map<SequenceId, std::int64_t>& lengths() const { return lengths_; }

 private:
  std::map<SequenceId, std::int64_t> lengths_;
};

}  // namespace octavo::testkit
