// SPDX-License-Identifier: Apache-2.0
#include "testing/number.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace octavo::testkit {
namespace {

std::uint16_t bits_of(DType dtype, double value) {
  std::byte bytes[4] = {};
  store_number(dtype, value, bytes);
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  return bits;
}

TEST(Number, TakesEveryHalfThereAndBack) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    std::byte bytes[2];
    std::memcpy(bytes, &half, sizeof half);
    const double value = load_number(DType::F16, bytes);
    if (std::isnan(value)) continue;
    ASSERT_EQ(bits_of(DType::F16, value), half);
  }
}

TEST(Number, TakesEveryBfloatThereAndBack) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto bfloat = static_cast<std::uint16_t>(bits);
    std::byte bytes[2];
    std::memcpy(bytes, &bfloat, sizeof bfloat);
    const double value = load_number(DType::BF16, bytes);
    if (std::isnan(value)) continue;
    ASSERT_EQ(bits_of(DType::BF16, value), bfloat);
  }
}

TEST(Number, RoundsHalvesToEvenAtTies) {
  EXPECT_EQ(rounded(DType::F16, 2049.0), 2048.0);
  EXPECT_EQ(rounded(DType::F16, 2051.0), 2052.0);
  EXPECT_EQ(rounded(DType::F16, 2049.0001), 2050.0);
}

TEST(Number, RoundsBfloatsToEvenAtTies) {
  EXPECT_EQ(rounded(DType::BF16, 257.0), 256.0);
  EXPECT_EQ(rounded(DType::BF16, 259.0), 260.0);
}

TEST(Number, RoundsOnceToBfloatWhereFloatWouldMakeATie) {
  // 257 + 1e-9 is 257 as a float, a tie; the nearer bfloat is 258.
  EXPECT_EQ(rounded(DType::BF16, 257.0 + 1e-9), 258.0);
  EXPECT_EQ(rounded(DType::BF16, 257.0 - 1e-9), 256.0);
}

TEST(Number, OverflowsHalvesToInfinityFrom65520) {
  EXPECT_EQ(rounded(DType::F16, 65519.0), 65504.0);
  EXPECT_EQ(rounded(DType::F16, 65520.0), std::numeric_limits<double>::infinity());
}

TEST(Number, KeepsTheSmallestHalf) { EXPECT_EQ(rounded(DType::F16, 0x1p-24), 0x1p-24); }

TEST(Number, KeepsNan) {
  EXPECT_TRUE(std::isnan(rounded(DType::F16, std::nan(""))));
  EXPECT_TRUE(std::isnan(rounded(DType::BF16, std::nan(""))));
  EXPECT_TRUE(std::isnan(rounded(DType::F32, std::nan(""))));
}

}  // namespace
}  // namespace octavo::testkit
