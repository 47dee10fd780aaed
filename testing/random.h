// SPDX-License-Identifier: Apache-2.0
// Random numbers that are the same on every machine and with every standard library.
#pragma once

#include "testing/host_tensor.h"

#include <cmath>
#include <cstdint>
#include <numbers>

namespace octavo::testkit {

/// SplitMix64. The same seed gives the same numbers everywhere (normal ones as far as the maths
/// library agrees).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9U;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBU;
    return mixed ^ (mixed >> 31);
  }

  /// Uniform in [0, 1).
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

  /// Uniform in low … high, both included.
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }

  /// Of mean 0 and variance 1, by Box and Muller's transform.
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

  void fill_normal(HostTensor& tensor, double magnitude = 1.0) {
    for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.set(i, magnitude * normal());
  }

 private:
  std::uint64_t state_;
};

}  // namespace octavo::testkit
