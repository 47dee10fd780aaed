// SPDX-License-Identifier: Apache-2.0
#include "errors.h"

#include <fmt/format.h>

#include <new>

#include "runtime.h"

namespace octavo::python {
namespace {

void raise(const char* class_name, const char* message) {
  const nb::object type = nb::getattr(runtime().errors, class_name);
  // A message may quote bytes of the caller's that are no UTF-8.
  const nb::object text = nb::steal(PyUnicode_DecodeUTF8(
      message, static_cast<Py_ssize_t>(std::string_view(message).size()), "backslashreplace"));
  const nb::object error = type(text);
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(const std::exception_ptr& thrown, void* /*payload*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    raise(to_string(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    raise("OutOfMemory", "memory of the host is exhausted");
  }
}

}  // namespace

void throw_mismatch(std::string_view argument, std::string_view wanted, std::string_view got,
                    std::string_view hint) {
  std::string text = fmt::format("{}: wanted {}, got {}", argument, wanted, got);
  if (!hint.empty()) text += fmt::format(" ({})", hint);
  throw Error(ErrorCode::InvalidArgument, text);
}

void raise_cache_full(const Shortage& shortage) {
  const nb::object type = nb::getattr(runtime().errors, "CacheFull");
  const nb::object error = type(shortage.to_string());
  nb::setattr(error, "shortage", nb::cast(shortage));
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

void register_errors() { nb::register_exception_translator(translate); }

}  // namespace octavo::python
