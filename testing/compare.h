// SPDX-License-Identifier: Apache-2.0
// Compares a step's results with the right ones and says where they part.
#pragma once

#include "testing/case.h"
#include "testing/host_tensor.h"

#include <octavo/types.h>

#include <cstdint>
#include <string>

namespace octavo::testkit {

/// The element that lies furthest beyond (or least inside) its allowance.
struct Worst {
  bool found = false;  ///< False as long as nothing was compared.
  std::string tensor;  ///< "out" or "lse"
  std::int64_t step = 0;
  std::int64_t seq_idx = 0;  ///< Batch row.
  SequenceId id = 0;
  std::int64_t token_idx = 0;  ///< Within the sequence's new tokens.
  std::int64_t head = 0;
  std::int64_t dim = -1;  ///< -1 for the LSE.
  bool padding = false;   ///< A row beyond the sequence's new tokens.
  double wanted = 0.0;
  double got = 0.0;
  double excess = -1.0;  ///< |got - wanted| over what is allowed; infinite when one of them is NaN
                         ///< or infinite and the other is not the same.

  [[nodiscard]] double error() const;
  /// E.g. "step 2, out[seq 1 (id 9), token 4, head 2, dim 17]: wanted 0.123, got 0.127".
  [[nodiscard]] std::string to_string() const;
};

struct Comparison {
  Worst worst;
  double rms = 0.0;  ///< Relative RMS error of the output, the largest of the steps.
  bool rms_ok = true;

  [[nodiscard]] bool ok() const { return worst.excess <= 1.0 && rms_ok; }
};

/// Holds one step's `out` [as step.out] and `lse` [tokens, heads] to the case's expectations and
/// adds what it finds to `total`. Padding rows of `out`, and rows that see no key, must be exactly
/// 0; the LSE of the latter exactly -inf.
void compare_step(const Case& value, std::int64_t step_idx, const HostTensor& out,
                  const HostTensor& lse, Comparison& total);

/// |got - wanted| over atol + rtol * |wanted|; see Worst::excess.
double excess_of(double wanted, double got, double atol, double rtol);

}  // namespace octavo::testkit
