// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <fmt/format.h>

#include <limits>
#include <optional>

#include "errors.h"
#include "names.h"
#include "runtime.h"

namespace octavo::python {
namespace {

std::optional<DType> plain_dtype(const Memory& memory) {
  switch (memory.kind) {
    case Kind::Float:
      if (memory.bytes == 4) return DType::F32;
      if (memory.bytes == 2) return DType::F16;
      break;
    case Kind::Bfloat:
      return DType::BF16;
    case Kind::Float8E4M3:
      return DType::F8E4M3;
    case Kind::Int:
      if (memory.bytes == 4) return DType::I32;
      if (memory.bytes == 1) return DType::I8;
      break;
    case Kind::Uint:
    case Kind::Other:
      break;
  }
  return std::nullopt;
}

bool are_bits(const Memory& memory) {
  return memory.kind == Kind::Int || memory.kind == Kind::Uint || memory.kind == Kind::Other;
}

[[noreturn]] void throw_dtype(std::string_view name, std::string_view wanted,
                              const Memory& memory) {
  throw_mismatch(fmt::format("{}.dtype", name), wanted, kind_text(memory),
                 are_bits(memory) ? "octavo.TypedArray names the dtype of bits" : "");
}

DType named_dtype(std::string_view name, nb::handle typed, const Memory& memory) {
  const DType dtype = dtype_named(name, nb::getattr(typed, "dtype"));
  if (!are_bits(memory) && plain_dtype(memory) != dtype) {
    throw_mismatch(fmt::format("{}.array.dtype", name),
                   fmt::format("integers that hold {}", to_string(dtype)), kind_text(memory));
  }
  if (memory.bytes != dtype_bytes(dtype)) {
    throw_mismatch(fmt::format("{}.array.dtype", name),
                   fmt::format("{} bytes ({})", dtype_bytes(dtype), to_string(dtype)),
                   fmt::format("{} bytes ({})", memory.bytes, kind_text(memory)));
  }
  return dtype;
}

bool is_typed(nb::handle object) { return Py_TYPE(object.ptr()) == runtime().typed_array; }

nb::tuple shape_tuple(std::span<const std::int64_t> shape) {
  nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
  if (!tuple.is_valid()) throw nb::python_error();
  for (std::size_t axis = 0; axis < shape.size(); ++axis)
    PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(axis), PyLong_FromLongLong(shape[axis]));
  return nb::borrow<nb::tuple>(tuple);
}

bool is_dense(const Memory& memory) {
  std::int64_t dense = 1;
  for (std::int32_t axis = memory.rank - 1; axis >= 0; --axis) {
    const auto i = static_cast<std::size_t>(axis);
    if (memory.shape[i] > 1 && memory.strides[i] != dense) return false;
    dense *= memory.shape[i];
  }
  return true;
}

void check_device(std::string_view name, const Memory& memory, Device device) {
  if (memory.device != device) {
    throw_mismatch(fmt::format("{}.device", name), device_text(device), device_text(memory.device));
  }
}

}  // namespace

std::string shape_text(const Memory& memory) {
  const auto rank = static_cast<std::ptrdiff_t>(memory.rank);
  return fmt::format("[{}]", fmt::join(memory.shape.begin(), memory.shape.begin() + rank, ", "));
}

Array::Array(std::string_view name, nb::handle object) : object_(object), inner_(object) {
  const bool typed = is_typed(object);
  if (typed) inner_ = nb::getattr(object, "array").release().dec_ref();
  memory_ = read_memory(name, inner_);
  const std::optional<DType> dtype =
      typed ? named_dtype(name, object, memory_) : plain_dtype(memory_);
  if (!dtype) throw_dtype(name, "f32, f16 or bf16", memory_);
  view_.data = memory_.data;
  view_.dtype = *dtype;
  view_.device = memory_.device;
  view_.rank = memory_.rank;
  view_.shape = memory_.shape;
  view_.strides = memory_.strides;
}

const TensorView& Array::writable(std::string_view name) const {
  if (memory_.read_only) {
    throw_mismatch(name, "a writable array", fmt::format("a read-only {}", type_text(inner_)),
                   memory_.framework == Framework::Jax ? "JAX's never are: leave it out" : "");
  }
  return view_;
}

nb::object Array::make(std::span<const std::int64_t> shape, bool float32) const {
  nb::object made;
  if (memory_.framework == Framework::Numpy) {
    const nb::object own =
        float32 ? nb::object() : nb::steal(PyObject_GetAttr(inner_.ptr(), runtime().dtype));
    const nb::handle dtype = float32 ? nb::handle(runtime().float32) : nb::handle(own);
    made = nb::handle(runtime().empty)(shape_tuple(shape), dtype);
  } else {
    made = nb::getattr(runtime().results, "new_like")(inner_, shape_tuple(shape), float32);
  }
  if (float32 || !is_typed(object_)) return made;
  return nb::handle(reinterpret_cast<PyObject*>(runtime().typed_array))(
      made, nb::getattr(object_, "dtype"));
}

nb::object Array::finish(nb::object made) const {
  if (memory_.framework != Framework::Jax) return made;
  return nb::getattr(runtime().results, "to_jax")(made);
}

Result::Result(std::string_view name, nb::handle given, const Array& like,
               std::span<const std::int64_t> shape, bool float32) {
  if (given.is_none()) {
    object_ = like.make(shape, float32);
    like_ = &like;
  } else {
    object_ = nb::borrow(given);
  }
  array_ = Array(name, object_);
  static_cast<void>(array_.writable(name));
}

nb::object Result::finish() {
  return like_ != nullptr ? like_->finish(std::move(object_)) : std::move(object_);
}

LseResult::LseResult(nb::handle given, const Array& like, std::int64_t num_tokens,
                     std::int64_t num_q_heads)
    : wanted_(!given.is_none() && given.ptr() != Py_False) {
  if (!wanted_) return;
  const std::int64_t shape[] = {num_tokens, num_q_heads};
  const nb::object none = nb::none();
  result_ = Result("lse", given.ptr() == Py_True ? nb::handle(none) : given, like, shape, true);
  view_ = result_.view();
}

LseResult::LseResult(nb::handle given, const Array& like, std::int64_t num_tokens,
                     std::int64_t num_q_heads, LseAxes axes)
    : LseResult(given, like, num_tokens, num_q_heads) {
  const TensorView whole = view_;
  view_.rank = 2;
  view_.shape = {whole.shape.at(axes.token), whole.shape.at(axes.head)};
  view_.strides = {whole.strides.at(axes.token), whole.strides.at(axes.head)};
}

nb::object LseResult::beside(nb::object out) {
  if (!wanted_) return out;
  return nb::make_tuple(std::move(out), result_.finish());
}

const float* floats(std::string_view name, nb::handle object, std::int64_t count, Device device) {
  if (object.is_none()) return nullptr;
  const Memory memory = read_memory(name, object);
  if (memory.kind != Kind::Float || memory.bytes != 4) throw_dtype(name, "float32", memory);
  if (memory.rank != 1 || memory.shape[0] != count)
    throw_mismatch(fmt::format("{}.shape", name), fmt::format("[{}]", count), shape_text(memory));
  if (!is_dense(memory)) throw_mismatch(fmt::format("{}.strides", name), "a dense array", "gaps");
  check_device(name, memory, device);
  return static_cast<const float*>(memory.data);
}

Integers::Integers(std::string_view name, nb::handle object, Device device) {
  if (object.is_none()) return;
  if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) {
    if (device.type != DeviceType::Cpu)
      throw_mismatch(name, fmt::format("an int32 array on {}", device_text(device)),
                     type_text(object));
    read_sequence(name, object);
  } else {
    read_array(name, object, device);
  }
}

void Integers::read_array(std::string_view name, nb::handle object, Device device) {
  const Memory memory = read_memory(name, object);
  check_device(name, memory, device);
  if (memory.rank != 1)
    throw_mismatch(fmt::format("{}.shape", name), "one axis", shape_text(memory));
  size_ = memory.shape[0];
  const bool wide = memory.bytes == 8;
  if (memory.kind != Kind::Int || !(memory.bytes == 4 || (wide && device.type == DeviceType::Cpu)))
    throw_dtype(name, "int32", memory);
  if (!wide) {
    if (!is_dense(memory)) throw_mismatch(fmt::format("{}.strides", name), "a dense array", "gaps");
    // Nothing is still a list: null would mean that none was given.
    static const std::int32_t kNone = 0;
    data_ = memory.data != nullptr ? static_cast<const std::int32_t*>(memory.data) : &kNone;
    return;
  }
  copied_.reserve(static_cast<std::size_t>(size_) + 1);
  for (std::int64_t i = 0; i < size_; ++i) {
    const std::int64_t value = static_cast<const std::int64_t*>(memory.data)[i * memory.strides[0]];
    if (value < std::numeric_limits<std::int32_t>::min() ||
        value > std::numeric_limits<std::int32_t>::max())
      throw_mismatch(fmt::format("{}[{}]", name, i), "32 bits", fmt::to_string(value));
    copied_.push_back(static_cast<std::int32_t>(value));
  }
  data_ = copied_.data();
}

void Integers::read_sequence(std::string_view name, nb::handle object) {
  const Py_ssize_t size = PySequence_Size(object.ptr());
  copied_.reserve(static_cast<std::size_t>(size) + 1);
  for (Py_ssize_t i = 0; i < size; ++i) {
    const nb::object item = nb::steal(PySequence_GetItem(object.ptr(), i));
    if (!item.is_valid()) throw nb::python_error();
    const std::int64_t value = whole_number(fmt::format("{}[{}]", name, i), item);
    if (value < std::numeric_limits<std::int32_t>::min() ||
        value > std::numeric_limits<std::int32_t>::max())
      throw_mismatch(fmt::format("{}[{}]", name, i), "32 bits", fmt::to_string(value));
    copied_.push_back(static_cast<std::int32_t>(value));
  }
  size_ = size;
  data_ = copied_.data();
}

void Integers::require(std::string_view name, std::int64_t count) const {
  if (data_ != nullptr && size_ != count)
    throw_mismatch(fmt::format("{}.shape", name), fmt::format("[{}]", count),
                   fmt::format("[{}]", size_));
}

}  // namespace octavo::python
