// SPDX-License-Identifier: Apache-2.0
// Objects of Python that calls need over and over: looked up once, when the module is imported, and
// kept for the life of the process.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo::python {

namespace nb = nanobind;

struct Runtime {
  // Of NumPy.
  PyTypeObject* ndarray = nullptr;
  PyObject* empty = nullptr;
  PyObject* float32 = nullptr;

  // Of octavo's pure-Python parts.
  PyTypeObject* typed_array = nullptr;
  nb::handle errors;   ///< The module octavo._errors.
  nb::handle records;  ///< octavo._records
  nb::handle results;  ///< octavo._results

  // Names of attributes, interned.
  PyObject* array_struct = nullptr;
  PyObject* dlpack = nullptr;
  PyObject* dtype = nullptr;
  PyObject* array = nullptr;
};

/// Fills what `runtime` gives. Call once, at import.
void start_runtime();

const Runtime& runtime();

}  // namespace octavo::python
