// SPDX-License-Identifier: Apache-2.0
// The element types of GGUF tensors: their sizes, their names, and how to make floats of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace generate {

/// Numbers as the file format has them. Other numbers are other types, which this program only
/// knows by name.
enum class GgmlType : std::uint32_t { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, BF16 = 30 };

/// Elements and bytes of one block; {0, 0} for a type that cannot be read.
struct BlockSize {
  std::uint32_t elements = 0;
  std::uint32_t bytes = 0;
};
BlockSize block_size(GgmlType type) noexcept;

/// "Q4_1", also for types that cannot be read; "type 77" for unknown numbers.
std::string type_name(GgmlType type);

/// Bit patterns of the two half-width types. `to_bf16` rounds to nearest, ties to even.
float from_f16(std::uint16_t bits) noexcept;
float from_bf16(std::uint16_t bits) noexcept;
std::uint16_t to_bf16(float value) noexcept;

/// Widens out.size() elements, which must be whole blocks that start at `blocks`.
void dequantize(GgmlType type, const std::byte* blocks, std::span<float> out) noexcept;

}  // namespace generate
