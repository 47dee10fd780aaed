// SPDX-License-Identifier: Apache-2.0
// GGUF element types: block layouts and widening to float.
#include "examples/generate/quant.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace generate {
namespace {

constexpr std::size_t kBlock = 32;  // elements of a Q4_0, Q4_1 or Q8_0 block

template <typename T>
T read(const std::byte* at) noexcept {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// A block of packed nibbles: the low ones are elements 0 … 15, the high ones 16 … 31.
void unpack_nibbles(const std::byte* packed, float scale, float offset, float* out) noexcept {
  for (std::size_t i = 0; i < kBlock / 2; ++i) {
    const auto pair = std::to_integer<std::uint32_t>(packed[i]);
    out[i] = static_cast<float>(pair & 15U) * scale + offset;
    out[i + kBlock / 2] = static_cast<float>(pair >> 4U) * scale + offset;
  }
}

}  // namespace

BlockSize block_size(GgmlType type) noexcept {
  switch (type) {
    case GgmlType::F32:
      return {1, 4};
    case GgmlType::F16:
    case GgmlType::BF16:
      return {1, 2};
    case GgmlType::Q4_0:
      return {kBlock, 2 + kBlock / 2};
    case GgmlType::Q4_1:
      return {kBlock, 4 + kBlock / 2};
    case GgmlType::Q8_0:
      return {kBlock, 2 + kBlock};
  }
  return {};
}

std::string type_name(GgmlType type) {
  static constexpr std::array<const char*, 31> kNames = {
      "F32",     "F16",    "Q4_0",    "Q4_1",  "Q4_2",   "Q4_3",  "Q5_0",  "Q5_1",
      "Q8_0",    "Q8_1",   "Q2_K",    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K",  "Q8_K",
      "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS",
      "I8",      "I16",    "I32",     "I64",   "F64",    "IQ1_M", "BF16"};
  const auto number = static_cast<std::uint32_t>(type);
  return number < kNames.size() ? kNames[number] : fmt::format("type {}", number);
}

float from_f16(std::uint16_t bits) noexcept {
  const std::uint32_t sign = (bits & 0x8000U) << 16U;
  const std::uint32_t exponent = (bits >> 10U) & 31U;
  const std::uint32_t fraction = bits & 0x3FFU;
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(fraction), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t wide = exponent == 31 ? 255U : exponent + (127U - 15U);
  return std::bit_cast<float>(sign | (wide << 23U) | (fraction << 13U));
}

float from_bf16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

std::uint16_t to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  // A NaN must stay one: rounding could carry its payload away.
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16U) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U);
}

void dequantize(GgmlType type, const std::byte* blocks, std::span<float> out) noexcept {
  switch (type) {
    case GgmlType::F32:
      std::memcpy(out.data(), blocks, out.size_bytes());
      return;
    case GgmlType::F16:
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = from_f16(read<std::uint16_t>(blocks + 2 * i));
      }
      return;
    case GgmlType::BF16:
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = from_bf16(read<std::uint16_t>(blocks + 2 * i));
      }
      return;
    case GgmlType::Q4_0:
    case GgmlType::Q4_1:
    case GgmlType::Q8_0:
      break;
  }
  const std::size_t bytes = block_size(type).bytes;
  for (std::size_t i = 0; i + kBlock <= out.size(); i += kBlock, blocks += bytes) {
    const float scale = from_f16(read<std::uint16_t>(blocks));
    if (type == GgmlType::Q4_0) {
      unpack_nibbles(blocks + 2, scale, -8.0F * scale, &out[i]);
    } else if (type == GgmlType::Q4_1) {
      unpack_nibbles(blocks + 4, scale, from_f16(read<std::uint16_t>(blocks + 2)), &out[i]);
    } else {
      for (std::size_t j = 0; j < kBlock; ++j) {
        out[i + j] = static_cast<float>(read<std::int8_t>(blocks + 2 + j)) * scale;
      }
    }
  }
}

}  // namespace generate
