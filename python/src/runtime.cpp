// SPDX-License-Identifier: Apache-2.0
#include "runtime.h"

namespace octavo::python {
namespace {

Runtime the_runtime;

nb::handle module(const char* name) { return nb::module_::import_(name).release(); }

PyTypeObject* type_of(nb::handle owner, const char* name) {
  return reinterpret_cast<PyTypeObject*>(nb::getattr(owner, name).release().ptr());
}

}  // namespace

void start_runtime() {
  const nb::handle numpy = module("numpy");
  the_runtime.ndarray = type_of(numpy, "ndarray");
  the_runtime.empty = nb::getattr(numpy, "empty").release().ptr();
  the_runtime.float32 = nb::getattr(numpy, "dtype")("float32").release().ptr();
  the_runtime.errors = module("octavo._errors");
  the_runtime.records = module("octavo._records");
  the_runtime.results = module("octavo._results");
  the_runtime.typed_array = type_of(the_runtime.records, "TypedArray");
  the_runtime.array_struct = PyUnicode_InternFromString("__array_struct__");
  the_runtime.dlpack = PyUnicode_InternFromString("__dlpack__");
  the_runtime.dtype = PyUnicode_InternFromString("dtype");
  the_runtime.array = PyUnicode_InternFromString("array");
}

const Runtime& runtime() { return the_runtime; }

}  // namespace octavo::python
