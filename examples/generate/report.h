// SPDX-License-Identifier: Apache-2.0
// What is said about a run when it is over: figures for people, one object for programs.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "examples/generate/options.h"
#include "examples/generate/scheduler.h"

namespace generate {

struct Answer {
  std::string prompt;
  std::vector<TokenId> prompt_tokens;
  std::vector<TokenId> tokens;
  std::string text;
  FinishReason reason = FinishReason::EndOfText;
};

/// A run and the machine it ran on.
struct RunReport {
  RunStats run;
  double load_seconds = 0.0;
  double seconds = 0.0;           ///< From the first step to the last.
  double weight_bandwidth = 0.0;  ///< Bytes per second, measured; 0: not measured.
  std::size_t weight_bytes = 0;   ///< Read by one step.
  std::string backend;
};

/// The figures, several lines.
std::string to_text(const RunReport& report, const Options& options);

/// {"answers": [...], "stats": {...}}, in one line.
std::string to_json(const std::vector<Answer>& answers, const RunReport& report);

}  // namespace generate
