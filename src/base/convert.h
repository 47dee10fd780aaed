// SPDX-License-Identifier: Apache-2.0
// Float16 and bfloat16 as 16-bit patterns: to float32 exactly, from float32 rounded to nearest,
// ties to even. NaN stays NaN (quiet), infinities and signs stay. Scalar; the kernels have wide
// versions that agree with these bit for bit.
#pragma once

#include <bit>
#include <cstdint>

namespace octavo::base {

constexpr float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

constexpr std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  constexpr std::uint32_t kMagnitude = 0x7FFFFFFFU;
  constexpr std::uint32_t kInfinity = 0x7F800000U;
  constexpr std::uint32_t kQuietBit = 0x0040U;
  if ((bits & kMagnitude) > kInfinity) return static_cast<std::uint16_t>((bits >> 16U) | kQuietBit);
  const std::uint32_t round = 0x7FFFU + ((bits >> 16U) & 1U);
  return static_cast<std::uint16_t>((bits + round) >> 16U);
}

constexpr float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16U;
  const std::uint32_t exponent = (bits >> 10U) & 0x1FU;
  const std::uint32_t fraction = bits & 0x3FFU;
  if (exponent == 0x1FU) {  // infinity, or NaN made quiet
    const std::uint32_t quiet = fraction != 0 ? 0x00400000U : 0U;
    return std::bit_cast<float>(sign | 0x7F800000U | quiet | (fraction << 13U));
  }
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in float32
    const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112U) << 23U) | (fraction << 13U));
}

constexpr std::uint16_t float_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16U) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  constexpr std::uint32_t kOverflow = 0x477FF000U;  // 65520, from where rounding gives infinity
  constexpr std::uint32_t kSmallestNormal = 0x38800000U;  // 2^-14
  if (magnitude > 0x7F800000U) {
    return static_cast<std::uint16_t>(sign | 0x7E00U | ((magnitude >> 13U) & 0x3FFU));
  }
  if (magnitude >= kOverflow) return static_cast<std::uint16_t>(sign | 0x7C00U);
  if (magnitude < kSmallestNormal) {
    // Adding 0.5 aligns the last kept bit with float32's last bit, so that the addition itself
    // rounds to even.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x3F000000U));
  }
  const std::uint32_t rebiased = magnitude - (112U << 23U);
  const std::uint32_t round = 0xFFFU + ((rebiased >> 13U) & 1U);
  return static_cast<std::uint16_t>(sign | ((rebiased + round) >> 13U));
}

}  // namespace octavo::base
