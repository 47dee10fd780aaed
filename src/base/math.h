// SPDX-License-Identifier: Apache-2.0
// Integer arithmetic that says when it overflows.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace octavo::base {

/// ceil(a / b) for a >= 0, b > 0.
template <typename IntT>
constexpr IntT ceil_div(IntT a, IntT b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// The product of non-negative factors, or nothing when it passes int64.
constexpr std::optional<std::int64_t> checked_product(std::initializer_list<std::int64_t> factors) {
  std::int64_t product = 1;
  for (const std::int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) return std::nullopt;
  }
  return product;
}

}  // namespace octavo::base
