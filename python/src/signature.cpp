// SPDX-License-Identifier: Apache-2.0
// What the fronts know calls again by: shapes, strides, dtypes and places of their arrays, and
// plain words, in a fraction of what asking PyTorch for them costs. What is in the arrays doesn't
// count.
#include <octavo/error.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "layer.h"
#include "memory.h"

namespace octavo::python {
namespace {

using Numbers = std::vector<std::int64_t>;

/// What comes next. An array begins with its rank, which is none of these.
enum class Mark : std::int64_t {
  NoArray = -1,
  None = -2,
  Bool = -3,
  Int = -4,
  Float = -5,
  Text = -6
};

void add(Mark mark, std::int64_t value, Numbers& out) {
  out.push_back(static_cast<std::int64_t>(mark));
  out.push_back(value);
}

void add_array(const Memory& memory, Numbers& out) {
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

/// Whether `word` is of a kind whose value says it all.
bool add_word(nb::handle word, Numbers& out) {
  PyObject* object = word.ptr();
  if (word.is_none()) {
    add(Mark::None, 0, out);
  } else if (PyBool_Check(object)) {
    add(Mark::Bool, object == Py_True ? 1 : 0, out);
  } else if (PyLong_CheckExact(object)) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) return false;
    add(Mark::Int, value, out);
  } else if (PyFloat_CheckExact(object)) {
    add(Mark::Float, std::bit_cast<std::int64_t>(PyFloat_AsDouble(object)), out);
  } else if (PyUnicode_CheckExact(object)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) {
      PyErr_Clear();
      return false;
    }
    add(Mark::Text, size, out);
    out.insert(out.end(), text, text + size);
  } else {
    return false;
  }
  return true;
}

bool wants_gradients(nb::handle array) {
  static PyObject* const kName = PyUnicode_InternFromString("requires_grad");
  const nb::object wants = nb::steal(PyObject_GetAttr(array.ptr(), kName));
  if (!wants.is_valid()) throw nb::python_error();
  return wants.ptr() != Py_False;
}

nb::bytes bytes_of(const Numbers& numbers) {
  return nb::bytes(numbers.data(), numbers.size() * sizeof(std::int64_t));
}

nb::bytes signature(const nb::args& arrays) {
  Numbers out;
  out.reserve(16 * arrays.size());
  for (const nb::handle array : arrays) {
    if (array.is_none()) {
      out.push_back(static_cast<std::int64_t>(Mark::NoArray));
    } else {
      add_array(read_memory("array", array), out);
    }
  }
  return bytes_of(out);
}

nb::object kind_of_call(const nb::tuple& words, const nb::args& tensors) {
  Numbers out;
  out.reserve(2 * words.size() + 16 * tensors.size());
  for (const nb::handle word : words) {
    if (!add_word(word, out)) return nb::none();
  }
  try {
    for (const nb::handle tensor : tensors) {
      if (tensor.is_none()) {
        out.push_back(static_cast<std::int64_t>(Mark::NoArray));
        continue;
      }
      const Memory memory = read_memory("tensor", tensor);
      if (memory.framework != Framework::Torch || wants_gradients(tensor)) return nb::none();
      add_array(memory, out);
    }
  } catch (const Error&) {  // whoever looks at it anew says what is wrong
    return nb::none();
  } catch (const nb::python_error&) {
    return nb::none();
  }
  return bytes_of(out);
}

}  // namespace

void bind_signature(nb::module_& module) {
  module.def("_signature", signature, nb::arg("arrays"),
             "Equal for arrays of the same shapes, strides, dtypes, frameworks and devices.");
  module.def("_kind_of_call", kind_of_call, nb::arg("words"), nb::arg("tensors"),
             "What the course of a call follows from beside the numbers in its tensors: their\n"
             "signatures and the words. None for a call that is to be looked at anew: with other\n"
             "things than PyTorch's tensors and plain words, or with gradients.");
}

}  // namespace octavo::python
