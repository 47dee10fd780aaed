// SPDX-License-Identifier: Apache-2.0
#include "names.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <span>

#include "errors.h"
#include "memory.h"
#include "runtime.h"

namespace octavo::python {
namespace {

/// The text of a str, or nothing.
std::string_view text_of(nb::handle object) {
  if (!PyUnicode_Check(object.ptr())) return {};
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();  // lone surrogates: no word of ours
    return {};
  }
  return {text, static_cast<std::size_t>(size)};
}

std::string got_text(nb::handle object) {
  return PyUnicode_Check(object.ptr()) ? nb::cast<std::string>(nb::repr(object))
                                       : type_text(object);
}

template <typename EnumT, typename TextT>
EnumT named(std::string_view argument, nb::handle object, std::span<const EnumT> all, TextT text) {
  const std::string_view got = text_of(object);
  for (const EnumT value : all) {
    if (got == text(value)) return value;
  }
  std::string wanted;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i > 0) wanted += i + 1 < all.size() ? ", " : " or ";
    wanted += fmt::format("'{}'", text(all[i]));
  }
  throw_mismatch(argument, wanted, got_text(object));
}

constexpr std::array kDTypes = {DType::F32,    DType::F16, DType::BF16,
                                DType::F8E4M3, DType::I8,  DType::I32};
constexpr std::array kFormats = {TensorFormat::Thd, TensorFormat::Bshd, TensorFormat::Sbhd};
constexpr std::array kKinds = {CacheKind::Paged, CacheKind::Contiguous};
constexpr std::array kBackends = {Backend::Auto,  Backend::Unfused, Backend::Cpu,
                                  Backend::Fused, Backend::Flash2,  Backend::Flash3};
constexpr std::array kMasks = {Mask::Causal, Mask::Full};
constexpr std::array kComputes = {Compute::Same, Compute::Fp8};
constexpr std::array kRopeStyles = {RopeStyle::Half, RopeStyle::Interleaved};

constexpr auto kToString = [](auto value) { return std::string_view(to_string(value)); };

}  // namespace

DType dtype_named(std::string_view argument, nb::handle name) {
  return named<DType>(argument, name, kDTypes, kToString);
}
TensorFormat format_named(std::string_view argument, nb::handle name) {
  return named<TensorFormat>(argument, name, kFormats, kToString);
}
CacheKind kind_named(std::string_view argument, nb::handle name) {
  return named<CacheKind>(argument, name, kKinds, kToString);
}
Backend backend_named(std::string_view argument, nb::handle name) {
  return named<Backend>(argument, name, kBackends, kToString);
}
Mask mask_named(std::string_view argument, nb::handle name) {
  return named<Mask>(argument, name, kMasks, kToString);
}
Compute compute_named(std::string_view argument, nb::handle name) {
  return named<Compute>(argument, name, kComputes, kToString);
}
RopeStyle rope_style_named(std::string_view argument, nb::handle name) {
  return named<RopeStyle>(argument, name, kRopeStyles, rope_style_text);
}

Device device_named(std::string_view argument, nb::handle name) {
  const nb::object whole = nb::steal(PyObject_Str(name.ptr()));  // torch.device prints as we spell
  if (!whole.is_valid()) throw nb::python_error();
  const std::string_view text = text_of(whole);
  if (text == "cpu") return {};
  if (text == "cuda") return {DeviceType::Cuda, 0};
  constexpr std::string_view kPrefix = "cuda:";
  if (text.starts_with(kPrefix) && text.size() > kPrefix.size() && text.size() < 10) {
    std::int32_t index = 0;
    for (const char digit : text.substr(kPrefix.size())) {
      if (digit < '0' || digit > '9') index = -1;
      if (index >= 0) index = index * 10 + (digit - '0');
    }
    if (index >= 0) return {DeviceType::Cuda, index};
  }
  throw_mismatch(argument, "'cpu', 'cuda' or 'cuda:N'", got_text(name));
}

std::string device_text(Device device) {
  if (device.type == DeviceType::Cpu) return "cpu";
  return fmt::format("{}:{}", to_string(device.type), device.index);
}

const char* rope_style_text(RopeStyle style) noexcept {
  return style == RopeStyle::Half ? "half" : "interleaved";
}

std::int64_t whole_number(std::string_view argument, nb::handle object) {
  const nb::object index = nb::steal(PyNumber_Index(object.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    throw_mismatch(argument, "an int", type_text(object));
  }
  const long long value = PyLong_AsLongLong(index.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw_mismatch(argument, "at most 64 bits", nb::cast<std::string>(nb::str(index)));
  }
  return value;
}

namespace {

CUstream_st* stream_at(nb::handle address) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(address.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw_mismatch("stream", "an address", nb::cast<std::string>(nb::repr(address)));
  }
  return std::bit_cast<CUstream_st*>(static_cast<std::uintptr_t>(value));
}

}  // namespace

Stream stream_of(nb::handle object, Device device) {
  if (device.type == DeviceType::Cpu) return {};
  if (PyLong_CheckExact(object.ptr())) return {stream_at(object)};
  return {stream_at(nb::getattr(runtime().results, "stream_address")(object, device.index))};
}

}  // namespace octavo::python
