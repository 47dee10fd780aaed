// SPDX-License-Identifier: Apache-2.0
// Memory of the tests' tensors, which notices writes beyond its ends.
#pragma once

#include <octavo/types.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/elements.h"

namespace octavo::test {

inline constexpr std::size_t kGuard = 32;

inline std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

// A dense tensor of any dtype with guard elements on both sides, filled with one value.
struct Buffer {
  Buffer(DType of, std::int64_t elements, float fill)
      : dtype(of),
        count(elements),
        bytes((static_cast<std::size_t>(elements) + 2 * kGuard) *
              static_cast<std::size_t>(dtype_bytes(of))) {
    for (std::int64_t i = -static_cast<std::int64_t>(kGuard);
         i < count + static_cast<std::int64_t>(kGuard); ++i) {
      set(i, fill);
    }
  }
  void* data() { return bytes.data() + kGuard * static_cast<std::size_t>(dtype_bytes(dtype)); }
  float get(std::int64_t i) { return kernels::cpu::load_element(data(), dtype, i); }
  void set(std::int64_t i, float value) { kernels::cpu::store_element(data(), dtype, i, value); }
  bool guards_hold(float fill) {
    bool hold = true;
    for (std::int64_t i = 1; i <= static_cast<std::int64_t>(kGuard); ++i) {
      hold = hold && std::bit_cast<std::uint32_t>(get(-i)) == std::bit_cast<std::uint32_t>(fill) &&
             std::bit_cast<std::uint32_t>(get(count - 1 + i)) == std::bit_cast<std::uint32_t>(fill);
    }
    return hold;
  }

  DType dtype;
  std::int64_t count;
  std::vector<char> bytes;
};

}  // namespace octavo::test
