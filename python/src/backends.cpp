// SPDX-License-Identifier: Apache-2.0
// Which backends there are, and why one was or wasn't chosen.
#include <octavo/backend.h>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "layer.h"
#include "runtime.h"

namespace octavo::python {
namespace {

nb::list supports(const Explanation& explanation) {
  nb::list list;
  const nb::object record = nb::getattr(runtime().records, "Support");
  for (const Support& s : explanation.backends)
    list.append(record(to_string(s.backend), s.ok, s.required, s.supported, s.missing));
  return list;
}

nb::list all_backends() {
  nb::list list;
  const nb::object record = nb::getattr(runtime().records, "BackendInfo");
  for (const BackendInfo& info : backends())
    list.append(record(to_string(info.backend), info.compiled, info.usable, info.description,
                       info.why_not));
  return list;
}

}  // namespace

nb::object explanation_of(const Explanation& explanation) { return nb::cast(explanation); }

void bind_backends(nb::module_& module) {
  nb::class_<Explanation>(module, "Explanation",
                          "Every backend's answer for one step, and the choice; str() prints all.")
      .def("__str__", &Explanation::to_string)
      .def("__repr__",
           [](const Explanation& self) {
             return std::string("<Explanation: ") + to_string(self.chosen) + ">";
           })
      .def_prop_ro(
          "chosen", [](const Explanation& self) { return std::string(to_string(self.chosen)); },
          "A backend's name; 'auto': none can run it.")
      .def_ro("reason", &Explanation::reason, "Why that one, in a sentence.")
      .def_prop_ro("backends", supports,
                   "[Support(backend, ok, required, supported, missing)], in order of preference.");
  module.def(
      "backends", all_backends,
      "All backends, usable on this machine or not, as BackendInfo. Never raises for a missing\n"
      "device or library: that is what it reports.");
  module.def("cpu_target", cpu_target,
             "The instruction set that the CPU kernels use on this machine, e.g. 'AVX3_ZEN4'.");
}

}  // namespace octavo::python
