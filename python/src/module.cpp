// SPDX-License-Identifier: Apache-2.0
// The module octavo._native: everything that octavo/__init__.py hands on.
#include <nanobind/nanobind.h>
#include <octavo/version.h>

#include "array.h"
#include "cache.h"
#include "errors.h"
#include "layer.h"
#include "names.h"
#include "runtime.h"
#include "workspace.h"

namespace octavo::python {
namespace {

/// For tests: what the library would be told of an array.
nb::tuple describe(nb::handle object) {
  const Array array("array", object);
  const TensorView& view = array.view();
  nb::list shape, strides;
  for (std::int32_t axis = 0; axis < view.rank; ++axis) {
    shape.append(view.shape[static_cast<std::size_t>(axis)]);
    strides.append(view.strides[static_cast<std::size_t>(axis)]);
  }
  return nb::make_tuple(reinterpret_cast<std::uintptr_t>(view.data), to_string(view.dtype),
                        nb::tuple(shape), nb::tuple(strides), device_text(view.device),
                        array.read_only());
}

}  // namespace
}  // namespace octavo::python

NB_MODULE(_native, module) {
  namespace python = octavo::python;
  // What a program still holds at its end, in a global or a cycle, is no leak of ours to report.
  nanobind::set_leak_warnings(false);
  module.doc() = "The compiled part of octavo; import octavo instead.";
  python::start_runtime();
  python::register_errors();
  module.attr("__version__") = octavo::version();
  python::bind_plan(module);
  python::bind_cache(module);
  python::bind_attention(module);
  python::bind_callers_cache(module);
  python::bind_workspace(module);
  python::bind_call_again(module);
  python::bind_graphed_step(module);
  python::bind_convert(module);
  python::bind_backends(module);
  python::bind_signature(module);
  module.def("_describe", python::describe, nanobind::arg("array"));
}
