// SPDX-License-Identifier: Apache-2.0
// Element types of GGUF, by hand-made blocks.
#include "examples/generate/quant.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace generate {
namespace {

// 1.5 and -0.25 as halves.
constexpr std::uint16_t kScale = 0x3E00;
constexpr std::uint16_t kMinimum = 0xB400;

void put_half(std::vector<std::byte>& block, std::uint16_t bits) {
  block.push_back(static_cast<std::byte>(bits & 0xFFU));
  block.push_back(static_cast<std::byte>(bits >> 8U));
}

// Nibble i of the low half is i, of the high half 15 - i.
void put_nibbles(std::vector<std::byte>& block) {
  for (unsigned i = 0; i < 16; ++i) block.push_back(static_cast<std::byte>(i | ((15 - i) << 4U)));
}

std::array<float, 32> widen(GgmlType type, const std::vector<std::byte>& block) {
  EXPECT_EQ(block.size(), block_size(type).bytes);
  std::array<float, 32> values = {};
  dequantize(type, block.data(), values);
  return values;
}

TEST(Quant, WidensQ40) {
  std::vector<std::byte> block;
  put_half(block, kScale);
  put_nibbles(block);
  const auto values = widen(GgmlType::Q4_0, block);
  EXPECT_EQ(values[0], -12.0F);
  EXPECT_EQ(values[9], 1.5F);
  EXPECT_EQ(values[16], 10.5F);
  EXPECT_EQ(values[31], -12.0F);
}

TEST(Quant, WidensQ41) {
  std::vector<std::byte> block;
  put_half(block, kScale);
  put_half(block, kMinimum);
  put_nibbles(block);
  const auto values = widen(GgmlType::Q4_1, block);
  EXPECT_EQ(values[0], -0.25F);
  EXPECT_EQ(values[3], 4.25F);
  EXPECT_EQ(values[16], 22.25F);
  EXPECT_EQ(values[31], -0.25F);
}

TEST(Quant, WidensQ80) {
  std::vector<std::byte> block;
  put_half(block, kScale);
  for (int i = 0; i < 32; ++i) block.push_back(static_cast<std::byte>(i * 8 - 128));
  const auto values = widen(GgmlType::Q8_0, block);
  EXPECT_EQ(values[0], -192.0F);
  EXPECT_EQ(values[16], 0.0F);
  EXPECT_EQ(values[31], 180.0F);
}

TEST(Quant, WidensHalves) {
  EXPECT_EQ(from_f16(0x3C00), 1.0F);
  EXPECT_EQ(from_f16(0xC000), -2.0F);
  EXPECT_EQ(from_f16(0x7BFF), 65504.0F);
  EXPECT_EQ(from_f16(0x0001), 0x1p-24F);
  EXPECT_EQ(from_f16(0x83FF), -0x1.FF8p-15F);
  EXPECT_TRUE(std::signbit(from_f16(0x8000)));
  EXPECT_EQ(from_f16(0x7C00), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(from_f16(0x7E00)));
}

TEST(Quant, RoundsToBfloatWithTiesToEven) {
  EXPECT_EQ(to_bf16(1.0F), 0x3F80);
  EXPECT_EQ(to_bf16(0x1.01p0F), 0x3F80);    // half way, the lower one is even
  EXPECT_EQ(to_bf16(0x1.03p0F), 0x3F82);    // half way, the upper one is even
  EXPECT_EQ(to_bf16(0x1.0102p0F), 0x3F81);  // just beyond half way
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()), 0x7F80);
}

TEST(Quant, KeepsNanWhenRounding) {
  EXPECT_TRUE(std::isnan(from_bf16(to_bf16(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(Quant, NamesTypesThatItCannotRead) {
  EXPECT_EQ(type_name(static_cast<GgmlType>(14)), "Q6_K");
  EXPECT_EQ(type_name(static_cast<GgmlType>(99)), "type 99");
}

}  // namespace
}  // namespace generate
