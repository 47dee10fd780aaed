// SPDX-License-Identifier: Apache-2.0
// The module octavo._native: everything that octavo/__init__.py hands on.
#include <nanobind/nanobind.h>
#include <octavo/version.h>

#include "cache.h"
#include "errors.h"
#include "layer.h"
#include "runtime.h"

NB_MODULE(_native, module) {
  namespace python = octavo::python;
  module.doc() = "The compiled part of octavo; import octavo instead.";
  python::start_runtime();
  python::register_errors();
  module.attr("__version__") = octavo::version();
  python::bind_plan(module);
  python::bind_cache(module);
  python::bind_attention(module);
  python::bind_callers_cache(module);
  python::bind_convert(module);
  python::bind_backends(module);
}
