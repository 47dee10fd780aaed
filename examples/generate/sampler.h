// SPDX-License-Identifier: Apache-2.0
// Picks the next token from logits.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "examples/generate/tokenizer.h"

namespace generate {

/// The most likely token (temperature 0), or one drawn with the probabilities that the temperature
/// gives. Each sequence has its own, so that nobody's draws depend on who else is in the batch.
class Sampler {
 public:
  /// The draws follow from `seed` and `stream` alone.
  Sampler(double temperature, std::uint64_t seed, std::uint64_t stream);

  /// The lowest id among equals. Errors: InvalidArgument for logits that are not finite.
  TokenId pick(std::span<const float> logits);

 private:
  double temperature_;
  std::mt19937_64 random_;
  std::vector<double> sums_;  // running sums of the probabilities, not normalised
};

}  // namespace generate
