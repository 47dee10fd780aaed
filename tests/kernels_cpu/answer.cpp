// SPDX-License-Identifier: Apache-2.0
// How answers are compared.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels_cpu/problem.h"

namespace octavo::test {

namespace {

std::string worst(const char* what, const std::vector<float>& got, const std::vector<float>& wanted,
                  double tolerance, double rms) {
  if (got.size() != wanted.size()) return std::string(what) + ": sizes differ";
  double excess = 0.0, error_square = 0.0, square = 0.0;
  std::size_t place_of_worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double x = static_cast<double>(got[i]), y = static_cast<double>(wanted[i]);
    if (std::isinf(y) && x == y) continue;
    const double error = std::abs(x - y);
    const double share = std::isfinite(error) ? error / (tolerance + tolerance * std::abs(y))
                                              : std::numeric_limits<double>::infinity();
    if (share > excess) {
      excess = share;
      place_of_worst = i;
    }
    error_square += error * error;
    square += y * y;
  }
  const std::string numbers = "[" + std::to_string(place_of_worst) + "] got " +
                              std::to_string(got.empty() ? 0.0F : got[place_of_worst]) +
                              ", wanted " +
                              std::to_string(wanted.empty() ? 0.0F : wanted[place_of_worst]) +
                              ", " + std::to_string(excess) + " of the tolerance";
  if (excess > 1.0) return std::string(what) + numbers;
  const double relative = square > 0.0 ? std::sqrt(error_square / square) : 0.0;
  if (relative > rms)
    return std::string(what) + ": relative RMS " + std::to_string(relative * 1e6) + "e-6";
  return {};
}

}  // namespace

std::string difference(const Answer& got, const Answer& wanted, double tolerance, double rms) {
  if (!got.padding_ok) return "padding or guards are wrong";
  const std::string out = worst("out", got.out, wanted.out, tolerance, rms);
  return out.empty() ? worst("lse", got.lse, wanted.lse, tolerance, rms) : out;
}

bool same_bits(const Answer& a, const Answer& b) {
  const auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
    return x.size() == y.size() &&
           (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
  };
  return same(a.out, b.out) && same(a.lse, b.lse);
}

}  // namespace octavo::test
