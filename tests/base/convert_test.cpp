// SPDX-License-Identifier: Apache-2.0
#include "base/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace octavo::base {
namespace {

/// The value of a float16 pattern by the definition of the format, in double.
double f16_by_definition(std::uint16_t bits) {
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  const int exponent = (bits >> 10U) & 0x1F;
  const int fraction = bits & 0x3FF;
  if (exponent == 0x1F) return fraction == 0 ? sign * HUGE_VAL : std::nan("");
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

TEST(Convert, ReadsEveryFloat16AsItsDefinitionSays) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const double wanted = f16_by_definition(static_cast<std::uint16_t>(bits));
    const double got = f16_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(wanted)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
    } else {
      ASSERT_EQ(wanted, got) << bits;
      ASSERT_EQ(std::signbit(wanted), std::signbit(got)) << bits;
    }
  }
}

TEST(Convert, Float16SurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = f16_to_float(half);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(f16_to_float(float_to_f16(value)))) << bits;
    } else {
      ASSERT_EQ(half, float_to_f16(value)) << bits;
    }
  }
}

TEST(Convert, RoundsToTheNearerFloat16AndTiesToEven) {
  for (std::uint32_t bits = 0; bits < 0x7BFF; ++bits) {
    const auto low = static_cast<std::uint16_t>(bits);
    const auto high = static_cast<std::uint16_t>(bits + 1);
    const float middle = (f16_to_float(low) + f16_to_float(high)) / 2.0F;  // exact in float32
    ASSERT_EQ((low & 1U) == 0 ? low : high, float_to_f16(middle)) << bits;
    ASSERT_EQ(low, float_to_f16(std::nextafter(middle, 0.0F))) << bits;
    ASSERT_EQ(high, float_to_f16(std::nextafter(middle, HUGE_VALF))) << bits;
  }
}

TEST(Convert, RoundsLargeValuesToFloat16Infinity) {
  EXPECT_EQ(0x7BFF, float_to_f16(65519.996F));
  EXPECT_EQ(0x7C00, float_to_f16(65520.0F));
  EXPECT_EQ(0xFC00, float_to_f16(-std::numeric_limits<float>::max()));
}

TEST(Convert, RoundsToTheNearerBfloat16AndTiesToEven) {
  for (std::uint32_t bits = 0; bits < 0x7F7F; ++bits) {
    const auto low = static_cast<std::uint16_t>(bits);
    const auto high = static_cast<std::uint16_t>(bits + 1);
    const auto middle = std::bit_cast<float>((bits << 16U) | 0x8000U);
    ASSERT_EQ(low, float_to_bf16(bf16_to_float(low))) << bits;
    ASSERT_EQ((low & 1U) == 0 ? low : high, float_to_bf16(middle)) << bits;
    ASSERT_EQ(low, float_to_bf16(std::nextafter(middle, 0.0F))) << bits;
    ASSERT_EQ(high, float_to_bf16(std::nextafter(middle, HUGE_VALF))) << bits;
  }
}

TEST(Convert, KeepsNanAndInfinityInBfloat16) {
  // A NaN whose payload lies in the bits that are cut off must not become an infinity.
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(0x7F800001U)))));
  EXPECT_EQ(0xFF80, float_to_bf16(-HUGE_VALF));
  EXPECT_EQ(0x7F80, float_to_bf16(std::numeric_limits<float>::max()));
}

}  // namespace
}  // namespace octavo::base
