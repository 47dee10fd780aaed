// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <fmt/format.h>
#include <octavo/dlpack.h>

#include <algorithm>
#include <unordered_map>

#include "errors.h"
#include "runtime.h"

namespace octavo::python {
namespace {

// ---- NumPy
// ---------------------------------------------------------------------------------------

/// The array interface's C form, as NumPy documents it.
struct ArrayInterface {
  int two;  // the protocol's mark
  int rank;
  char typekind;
  int itemsize;
  int flags;
  Py_ssize_t* shape;
  Py_ssize_t* strides;  // bytes
  void* data;
  PyObject* descr;
};
constexpr int kNotSwapped = 0x200;
constexpr int kWriteable = 0x400;

/// ml_dtypes' types: to NumPy they are bytes without a meaning, so their names count.
Kind named_kind(nb::handle array) {
  static PyObject* bfloat16 = nullptr;  // the last one seen: NumPy keeps one for all its arrays
  const nb::object dtype = nb::steal(PyObject_GetAttr(array.ptr(), runtime().dtype));
  if (!dtype.is_valid()) throw nb::python_error();
  if (dtype.ptr() == bfloat16) return Kind::Bfloat;
  const auto name = nb::cast<std::string>(nb::str(nb::getattr(dtype, "name")));
  if (name == "float8_e4m3fn") return Kind::Float8E4M3;
  if (name != "bfloat16") return Kind::Other;
  Py_XDECREF(bfloat16);
  bfloat16 = dtype.inc_ref().ptr();
  return Kind::Bfloat;
}

Kind numpy_kind(const ArrayInterface& interface, nb::handle array) {
  switch (interface.typekind) {
    case 'f':
      return interface.itemsize == 1 ? named_kind(array) : Kind::Float;
    case 'i':
      return Kind::Int;
    case 'u':
      return Kind::Uint;
    default:
      return named_kind(array);
  }
}

void check_rank(std::string_view name, std::int64_t rank) {
  if (rank > kMaxRank)
    throw_mismatch(fmt::format("{}.rank", name), fmt::format("at most {}", kMaxRank),
                   fmt::to_string(rank));
}

/// Strides of what has no elements lead nowhere, and NumPy gives 0 for them: dense ones, which
/// every check takes.
void settle_strides(Memory& memory) {
  const auto end = memory.shape.begin() + memory.rank;
  if (std::find(memory.shape.begin(), end, 0) == end) return;
  std::int64_t dense = 1;
  for (std::int32_t axis = memory.rank - 1; axis >= 0; --axis) {
    const auto i = static_cast<std::size_t>(axis);
    memory.strides[i] = dense;
    dense *= std::max<std::int64_t>(1, memory.shape[i]);
  }
}

Memory numpy_memory(std::string_view name, nb::handle array) {
  // A subclass may mean more than its memory says: what a mask hides would be read all the same.
  if (Py_TYPE(array.ptr()) != runtime().ndarray && nb::hasattr(array, "mask"))
    throw_mismatch(name, "an array without a mask", type_text(array));
  const nb::object capsule = nb::steal(PyObject_GetAttr(array.ptr(), runtime().array_struct));
  if (!capsule.is_valid()) throw nb::python_error();
  const auto* interface =
      static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (interface == nullptr) throw nb::python_error();
  check_rank(name, interface->rank);
  if ((interface->flags & kNotSwapped) == 0)
    throw_mismatch(fmt::format("{}.dtype", name), "the machine's byte order", "the other one");

  Memory memory;
  memory.data = interface->data;
  memory.rank = interface->rank;
  memory.bytes = interface->itemsize;
  memory.kind = numpy_kind(*interface, array);
  memory.read_only = (interface->flags & kWriteable) == 0;
  memory.framework = Framework::Numpy;
  for (int axis = 0; axis < interface->rank; ++axis) {
    const auto i = static_cast<std::size_t>(axis);
    memory.shape[i] = interface->shape[axis];
    const Py_ssize_t stride = interface->strides[axis];
    if (memory.bytes > 0 && stride % memory.bytes != 0 && memory.shape[i] > 1) {
      throw_mismatch(fmt::format("{}.strides", name),
                     fmt::format("multiples of {} bytes", memory.bytes), fmt::to_string(stride));
    }
    memory.strides[i] = memory.bytes > 0 ? stride / memory.bytes : 0;
  }
  settle_strides(memory);
  return memory;
}

// ---- DLPack
// --------------------------------------------------------------------------------------

struct ManagedTensor {
  dlpack::DlTensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct VersionedTensor {
  std::uint32_t major, minor;
  void* context;
  void (*deleter)(VersionedTensor*);
  std::uint64_t flags;  // bit 0: read-only
  dlpack::DlTensor tensor;
};

/// A type's own door to its tensors' memory (DLPack 1.2): no capsule, no Python call.
struct ExchangeApi {
  std::uint32_t major, minor;
  ExchangeApi* previous;
  void* allocate;
  void* take;
  void* give;
  int (*borrow)(void* object, dlpack::DlTensor* tensor);
  int (*current_stream)(std::int32_t device_type, std::int32_t device, void** stream);
};

struct TypeFacts {
  Framework framework = Framework::Other;
  const ExchangeApi* api = nullptr;
};

/// Of the type or of one that it derives from: people subclass PyTorch's tensors.
Framework framework_of(nb::handle type) {
  for (const nb::handle base : nb::getattr(type, "__mro__")) {
    const nb::object named = nb::getattr(base, "__module__", nb::str(""));
    const auto module = nb::cast<std::string>(nb::str(named));
    const std::string root = module.substr(0, module.find('.'));
    if (root == "torch") return Framework::Torch;
    if (root == "jaxlib" || root == "jax") return Framework::Jax;
  }
  return Framework::Other;
}

TypeFacts find_facts(PyTypeObject* type) {
  TypeFacts facts;
  const nb::handle object(reinterpret_cast<PyObject*>(type));
  facts.framework = framework_of(object);
  const nb::object capsule = nb::getattr(object, "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") != 0) {
    const auto* api =
        static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api->major == 1 && api->borrow != nullptr) facts.api = api;
  }
  return facts;
}

/// What is known of a type. The few types that callers bring are kept for good.
const TypeFacts& facts_of(PyTypeObject* type) {
  static std::unordered_map<PyTypeObject*, TypeFacts> known;
  const auto found = known.find(type);
  if (found != known.end()) return found->second;
  const TypeFacts facts = find_facts(type);
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  return known.emplace(type, facts).first->second;
}

// Device types of DLPack.
constexpr std::int32_t kDlCpu = 1;
constexpr std::int32_t kDlCuda = 2;
constexpr std::int32_t kDlCudaHost = 3;
constexpr std::int32_t kDlCudaManaged = 13;

Kind dlpack_kind(std::uint8_t code) {
  switch (code) {
    case 0:
      return Kind::Int;
    case 1:
      return Kind::Uint;
    case 2:
      return Kind::Float;
    case 4:
      return Kind::Bfloat;
    case 10:
      return Kind::Float8E4M3;
    default:
      return Kind::Other;
  }
}

void fill(std::string_view name, const dlpack::DlTensor& tensor, Memory& memory) {
  check_rank(name, tensor.ndim);
  switch (tensor.device.device_type) {
    case kDlCpu:
    case kDlCudaHost:
      break;
    case kDlCuda:
    case kDlCudaManaged:
      memory.device = {DeviceType::Cuda, tensor.device.device_id};
      break;
    default:
      throw_mismatch(fmt::format("{}.device", name), "the CPU or CUDA",
                     fmt::format("DLPack's device type {}", tensor.device.device_type));
  }
  memory.data = tensor.data == nullptr
                    ? nullptr
                    : static_cast<unsigned char*>(tensor.data) + tensor.byte_offset;
  memory.rank = tensor.ndim;
  memory.kind = tensor.dtype.lanes == 1 ? dlpack_kind(tensor.dtype.code) : Kind::Other;
  memory.bytes = tensor.dtype.bits / 8;
  std::int64_t dense = 1;
  for (std::int32_t axis = tensor.ndim - 1; axis >= 0; --axis) {
    const auto i = static_cast<std::size_t>(axis);
    memory.shape[i] = tensor.shape[axis];
    memory.strides[i] = tensor.strides != nullptr ? tensor.strides[axis] : dense;
    dense *= tensor.shape[axis];
  }
  settle_strides(memory);
}

/// PyTorch's imaginary part of a conjugate is minus what its memory holds, and DLPack can't say so.
/// A view into complex numbers never steps by 1: others need not be asked.
void check_negation(std::string_view name, nb::handle tensor, const Memory& memory) {
  if (memory.framework != Framework::Torch || memory.rank == 0) return;
  if (memory.strides[static_cast<std::size_t>(memory.rank) - 1] == 1) return;
  if (nb::cast<bool>(nb::getattr(tensor, "is_neg")()))
    throw_mismatch(name, "a tensor that means what its memory holds",
                   "one with its negation pending", "call resolve_neg()");
}

/// The capsule of __dlpack__. Of tensors on a GPU it is asked for without a synchronisation: the
/// work is enqueued on the caller's stream, where the tensors belong.
nb::object dlpack_capsule(nb::handle object) {
  const nb::object method = nb::getattr(object, "__dlpack__");
  const auto device = nb::cast<nb::tuple>(nb::getattr(object, "__dlpack_device__")());
  nb::dict arguments;
  if (nb::cast<int>(nb::int_(device[0])) == kDlCuda) arguments["stream"] = -1;
  arguments["max_version"] = nb::make_tuple(1, 0);
  try {
    return method(**arguments);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  nb::del(arguments["max_version"]);  // a producer from before DLPack 1.0
  return method(**arguments);
}

void read_capsule(std::string_view name, const nb::object& capsule, Memory& memory) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    const auto* managed = static_cast<const VersionedTensor*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->major != 1)
      throw_mismatch(name, "DLPack 1", fmt::format("DLPack {}", managed->major));
    memory.read_only = (managed->flags & 1U) != 0;
    fill(name, managed->tensor, memory);
    return;
  }
  const auto* managed =
      static_cast<const ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw nb::python_error();
  fill(name, managed->tensor, memory);
  // Its arrays are never writable, and the old capsule can't say so.
  memory.read_only = memory.framework == Framework::Jax;
}

}  // namespace

std::string type_text(nb::handle object) {
  const nb::handle type = object.type();
  const auto name = nb::cast<std::string>(nb::str(nb::getattr(type, "__qualname__")));
  const auto module = nb::cast<std::string>(nb::str(nb::getattr(type, "__module__")));
  return module == "builtins" ? name : module + "." + name;
}

std::string kind_text(const Memory& memory) {
  const int bits = memory.bytes * 8;
  switch (memory.kind) {
    case Kind::Float:
      return fmt::format("float{}", bits);
    case Kind::Bfloat:
      return fmt::format("bfloat{}", bits);
    case Kind::Float8E4M3:
      return "float8_e4m3fn";
    case Kind::Int:
      return fmt::format("int{}", bits);
    case Kind::Uint:
      return fmt::format("uint{}", bits);
    case Kind::Other:
      break;
  }
  return fmt::format("another dtype of {} bytes", memory.bytes);
}

Memory read_memory(std::string_view name, nb::handle object) {
  PyTypeObject* type = Py_TYPE(object.ptr());
  if (type == runtime().ndarray || PyType_IsSubtype(type, runtime().ndarray) != 0)
    return numpy_memory(name, object);

  const TypeFacts& facts = facts_of(type);
  Memory memory;
  memory.framework = facts.framework;
  if (facts.api != nullptr) {
    dlpack::DlTensor tensor = {};
    if (facts.api->borrow(object.ptr(), &tensor) != 0) throw nb::python_error();
    fill(name, tensor, memory);
    check_negation(name, object, memory);
    memory.read_only = facts.framework == Framework::Jax;
    return memory;
  }
  if (PyObject_HasAttr(object.ptr(), runtime().dlpack) == 0) {
    throw_mismatch(name, "an array (NumPy's, or any with __dlpack__)", type_text(object));
  }
  memory.keeper = dlpack_capsule(object);
  read_capsule(name, memory.keeper, memory);
  check_negation(name, object, memory);
  return memory;
}

}  // namespace octavo::python
