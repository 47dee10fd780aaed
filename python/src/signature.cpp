// SPDX-License-Identifier: Apache-2.0
// What the fronts know calls again by: shapes, strides, dtypes and places of their arrays, and
// plain words, in a fraction of what asking PyTorch for them costs. What is in the arrays doesn't
// count.
#include <octavo/error.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "layer.h"
#include "memory.h"

namespace octavo::python {
namespace {

using Numbers = std::vector<std::int64_t>;

/// What comes next. An array begins with its facts, which are at least 0.
enum class Mark : std::int64_t {
  None = -1,
  Bool = -2,
  Int = -3,
  Float = -4,
  Text = -5,
  Tuple = -6
};

void add(Mark mark, std::int64_t value, Numbers& out) {
  out.push_back(static_cast<std::int64_t>(mark));
  out.push_back(value);
}

void add_array(const Memory& memory, Numbers& out) {
  const auto rank = static_cast<std::ptrdiff_t>(memory.rank);
  std::int64_t facts = 0;
  for (const std::int64_t fact :
       {std::int64_t{memory.device.index}, static_cast<std::int64_t>(memory.device.type),
        static_cast<std::int64_t>(memory.framework), std::int64_t{memory.bytes},
        static_cast<std::int64_t>(memory.kind), std::int64_t{memory.rank}})
    facts = facts << 8 | (fact & 0xFF);
  out.push_back(facts);
  out.insert(out.end(), memory.shape.begin(), memory.shape.begin() + rank);
  out.insert(out.end(), memory.strides.begin(), memory.strides.begin() + rank);
}

void add_text(const char* text, Py_ssize_t size, Numbers& out) {
  constexpr std::size_t kWord = sizeof(std::int64_t);
  const auto length = static_cast<std::size_t>(size);
  add(Mark::Text, size, out);
  const std::size_t first = out.size();
  out.resize(first + (length + kWord - 1) / kWord, 0);
  std::memcpy(out.data() + first, text, length);
}

/// Whether `word` is of a kind whose value says it all.
bool add_word(nb::handle word, Numbers& out) {
  PyObject* object = word.ptr();
  if (word.is_none()) {
    out.push_back(static_cast<std::int64_t>(Mark::None));
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
    add_text(text, size, out);
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
      out.push_back(static_cast<std::int64_t>(Mark::None));
    } else {
      add_array(read_memory("array", array), out);
    }
  }
  return bytes_of(out);
}

/// Whether it is a word, one of PyTorch's tensors without gradients, or a tuple of such.
bool add_part(nb::handle part, Numbers& out) {
  PyObject* object = part.ptr();
  if (PyTuple_Check(object)) {
    const Py_ssize_t size = PyTuple_Size(object);
    add(Mark::Tuple, size, out);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!add_part(PyTuple_GetItem(object, i), out)) return false;
    }
    return true;
  }
  if (add_word(part, out)) return true;
  const Memory memory = read_memory("tensor", part);
  if (memory.framework != Framework::Torch || wants_gradients(part)) return false;
  add_array(memory, out);
  return true;
}

nb::object kind_of_call(const nb::args& parts) {
  Numbers out;
  out.reserve(128);
  try {
    for (const nb::handle part : parts) {
      if (!add_part(part, out)) return nb::none();
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
  module.def("_kind_of_call", kind_of_call, nb::arg("parts"),
             "What the course of a call follows from beside the numbers in its tensors: their\n"
             "signatures and the words, also in tuples. None for a call that is to be looked at\n"
             "anew: with other things than PyTorch's tensors and plain words, or with gradients.");
}

}  // namespace octavo::python
