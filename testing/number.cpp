// SPDX-License-Identifier: Apache-2.0
#include "testing/number.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace octavo::testkit {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <typename T>
T read(const std::byte* element) {
  T value;
  std::memcpy(&value, element, sizeof value);
  return value;
}

double half_to_double(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1F;
  const int fraction = bits & 0x3FF;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 0x1F) {
    return fraction != 0 ? kNan : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

std::uint16_t double_to_half(double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7E00);
  const double magnitude = std::fabs(value);
  // 65520 lies half way between the largest half and the next power of two; ties go to even, there.
  if (magnitude >= 65520.0) return static_cast<std::uint16_t>(sign | 0x7C00);
  const int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
  const auto units =
      static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  // A normal number's implicit bit adds one to the exponent field; a carry out of the fraction too.
  const std::uint32_t bits = (static_cast<std::uint32_t>(exponent + 14) << 10) + units;
  return static_cast<std::uint16_t>(sign | bits);
}

std::uint16_t double_to_bfloat(double value) {
  if (std::isnan(value)) return 0x7FC0;
  // Through float: bfloat's 8 bits are so few that rounding twice shows only at ties of the second
  // rounding; sticky bit 0 keeps those honest.
  float near = static_cast<float>(value);
  auto bits = std::bit_cast<std::uint32_t>(near);
  if (static_cast<double>(near) != value && std::isfinite(near)) {
    if (std::fabs(static_cast<double>(near)) > std::fabs(value)) --bits;
    bits |= 1;
  }
  const std::uint32_t bias = 0x7FFF + ((bits >> 16) & 1);
  return static_cast<std::uint16_t>((bits + bias) >> 16);
}

}  // namespace

double load_number(DType dtype, const std::byte* element) {
  switch (dtype) {
    case DType::F32:
      return static_cast<double>(read<float>(element));
    case DType::F16:
      return half_to_double(read<std::uint16_t>(element));
    case DType::BF16:
      return static_cast<double>(
          std::bit_cast<float>(static_cast<std::uint32_t>(read<std::uint16_t>(element)) << 16));
    case DType::I32:
      return static_cast<double>(read<std::int32_t>(element));
    case DType::F8E4M3:
    case DType::I8:
      break;
  }
  return kNan;
}

void store_number(DType dtype, double value, std::byte* element) {
  if (dtype == DType::F32) {
    const auto number = static_cast<float>(value);
    std::memcpy(element, &number, sizeof number);
  } else if (dtype == DType::F16 || dtype == DType::BF16) {
    const std::uint16_t bits =
        dtype == DType::F16 ? double_to_half(value) : double_to_bfloat(value);
    std::memcpy(element, &bits, sizeof bits);
  }
}

double rounded(DType dtype, double value) {
  std::byte bytes[4] = {};
  store_number(dtype, value, bytes);
  return load_number(dtype, bytes);
}

}  // namespace octavo::testkit
