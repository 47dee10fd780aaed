// SPDX-License-Identifier: Apache-2.0
// Greedy choice and temperature sampling.
#include "examples/generate/sampler.h"

#include <algorithm>
#include <cmath>

#include "examples/generate/error.h"

namespace generate {

Sampler::Sampler(double temperature, std::uint64_t seed, std::uint64_t stream)
    : temperature_(temperature) {
  const auto low = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
  const auto high = [](std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32U); };
  std::seed_seq mixed = {low(seed), high(seed), low(stream), high(stream)};
  random_.seed(mixed);
}

TokenId Sampler::pick(std::span<const float> logits) {
  for (const float logit : logits) {
    if (!std::isfinite(logit))
      fail("logits: wanted finite numbers, got {} (damaged weights?)", logit);
  }
  const auto best = std::max_element(logits.begin(), logits.end());
  if (temperature_ == 0.0) return static_cast<TokenId>(best - logits.begin());

  sums_.clear();
  double total = 0.0;
  for (const float logit : logits) {
    total += std::exp((static_cast<double>(logit) - static_cast<double>(*best)) / temperature_);
    sums_.push_back(total);
  }
  // The standard's distributions differ from library to library; 53 random bits do not.
  const double uniform = static_cast<double>(random_() >> 11U) * 0x1p-53;
  const auto drawn = std::upper_bound(sums_.begin(), sums_.end(), uniform * total);
  return static_cast<TokenId>(std::min(drawn - sums_.begin(), std::ssize(sums_) - 1));
}

}  // namespace generate
