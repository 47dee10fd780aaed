// SPDX-License-Identifier: Apache-2.0
// How an argument shows its memory: NumPy's array interface, or DLPack. Nothing is copied. What the
// numbers mean to Octavo stands in array.h.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <octavo/tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace octavo::python {

namespace nb = nanobind;

enum class Framework : std::uint8_t { Numpy, Torch, Jax, Other };

/// Kinds of elements, so far as they matter here.
enum class Kind : std::uint8_t { Float, Bfloat, Float8E4M3, Int, Uint, Other };

struct Memory {
  void* data = nullptr;
  Device device = {};
  std::int32_t rank = 0;
  std::array<std::int64_t, kMaxRank> shape = {};
  std::array<std::int64_t, kMaxRank> strides = {};  ///< Elements.
  Kind kind = Kind::Other;
  std::int32_t bytes = 0;  ///< Of one element.
  bool read_only = false;
  Framework framework = Framework::Other;
  nb::object keeper;  ///< What must live as long as `data` is used, beside the argument.

  [[nodiscard]] nb::object keeper_or_none() const {
    return keeper.is_valid() ? keeper : nb::object(nb::none());
  }
};

/// Reads `object` without copying. Errors: InvalidArgument for what shows no memory, has too many
/// axes, or lies where Octavo can't reach.
Memory read_memory(std::string_view name, nb::handle object);

/// "float64", "uint16" …
std::string kind_text(const Memory& memory);

/// "numpy.ndarray", "list" …
std::string type_text(nb::handle object);

}  // namespace octavo::python
