// SPDX-License-Identifier: Apache-2.0
// Measures one case of bench/cases.h.
#pragma once

#include "bench/cases.h"
#include "bench/machine.h"
#include "bench/roofline.h"

#include <octavo/types.h>

#include <cstdint>
#include <string>

namespace octavo::bench {

struct Conditions {
  Machine machine;
  const DramReader* dram = nullptr;  ///< Must outlive the measuring.
  double read_bytes_per_s = 0.0;     ///< Of DRAM when the bench began.
  double flops_per_s = 0.0;          ///< F32's peak.
  double bf16_flops_per_s = 0.0;     ///< BF16's, of decodes: prompts are multiplied in F32.
  std::int32_t num_threads = 0;
  Backend backend = Backend::Auto;
  bool quick = false;
};

struct Measurement {
  std::string skipped;  ///< Why there is no result; empty when there is one.
  Backend backend = Backend::Auto;
  double seconds = 0.0;        ///< Of one layer, or of one plan: the median.
  double bound_seconds = 0.0;  ///< What the bound that limits it would take.
  const char* bound = "";      ///< Its name.
};

/// Attention: caches of several layers rotate, so that the keys come from memory and not from the
/// last-level cache; a decode's DRAM bound is measured right before and behind it, and the faster
/// one counts. Plans: against the time that they are allowed.
Measurement measure(const BenchCase& value, const Conditions& conditions);

}  // namespace octavo::bench
