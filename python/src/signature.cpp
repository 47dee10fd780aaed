// SPDX-License-Identifier: Apache-2.0
// What the fronts know calls again by: shapes, strides, dtypes and places of their arrays, in a
// fraction of what asking PyTorch for them costs. What is in the arrays doesn't count.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "layer.h"
#include "memory.h"

namespace octavo::python {
namespace {

constexpr std::int64_t kNoArray = -1;

void add(const Memory& memory, std::vector<std::int64_t>& out) {
  const auto rank = static_cast<std::ptrdiff_t>(memory.rank);
  out.push_back(memory.rank);
  out.push_back(static_cast<std::int64_t>(memory.kind));
  out.push_back(memory.bytes);
  out.push_back(static_cast<std::int64_t>(memory.framework));
  out.push_back(static_cast<std::int64_t>(memory.device.type));
  out.push_back(memory.device.index);
  out.insert(out.end(), memory.shape.begin(), memory.shape.begin() + rank);
  out.insert(out.end(), memory.strides.begin(), memory.strides.begin() + rank);
}

nb::bytes signature(const nb::args& arrays) {
  std::vector<std::int64_t> out;
  out.reserve(16 * arrays.size());
  for (const nb::handle array : arrays) {
    if (array.is_none()) {
      out.push_back(kNoArray);
    } else {
      add(read_memory("array", array), out);
    }
  }
  return nb::bytes(out.data(), out.size() * sizeof(std::int64_t));
}

}  // namespace

void bind_signature(nb::module_& module) {
  module.def("_signature", signature, nb::arg("arrays"),
             "Equal for arrays of the same shapes, strides, dtypes, frameworks and devices.");
}

}  // namespace octavo::python
