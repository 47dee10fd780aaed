// SPDX-License-Identifier: Apache-2.0
// Words and numbers of the caller's: names of dtypes and the like, devices, streams.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <octavo/attention.h>
#include <octavo/types.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace octavo::python {

namespace nb = nanobind;

// Each throws InvalidArgument, with the words that there are, for any other.
DType dtype_named(std::string_view argument, nb::handle name);
TensorFormat format_named(std::string_view argument, nb::handle name);
CacheKind kind_named(std::string_view argument, nb::handle name);
Backend backend_named(std::string_view argument, nb::handle name);
Mask mask_named(std::string_view argument, nb::handle name);
Compute compute_named(std::string_view argument, nb::handle name);
RopeStyle rope_style_named(std::string_view argument, nb::handle name);
Device device_named(std::string_view argument, nb::handle name);

std::string device_text(Device device);
const char* rope_style_text(RopeStyle style) noexcept;

/// An int, or what says to be one (NumPy's integers). Errors: InvalidArgument for other things and
/// for more than 64 bits.
std::int64_t whole_number(std::string_view argument, nb::handle object);

/// The stream to enqueue on. None: the current one of PyTorch, else of CuPy, where the caller has
/// imported it; the device's default one otherwise. On the CPU none is looked for.
Stream stream_of(nb::handle object, Device device);

}  // namespace octavo::python
