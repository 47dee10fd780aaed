// SPDX-License-Identifier: Apache-2.0
// From octavo::Error to the exceptions of octavo/_errors.py, and the binding's own complaints in
// the library's form.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <octavo/error.h>
#include <octavo/plan.h>

#include <string>
#include <string_view>

namespace octavo::python {

/// Throws InvalidArgument: "argument: wanted W, got G (hint)".
[[noreturn]] void throw_mismatch(std::string_view argument, std::string_view wanted,
                                 std::string_view got, std::string_view hint = {});

/// Raises octavo.CacheFull with the shortage as its attribute.
[[noreturn]] void raise_cache_full(const Shortage& shortage);

void register_errors();

}  // namespace octavo::python
