// SPDX-License-Identifier: Apache-2.0
// The Python classes StepPlan and Shortage.
#include <nanobind/ndarray.h>
#include <nanobind/operators.h>
#include <nanobind/stl/string.h>
#include <octavo/plan.h>

#include <cstdint>
#include <span>

#include "cache.h"
#include "runtime.h"

namespace octavo::python {
namespace {

/// A read-only array over a span of the plan, which it keeps alive.
template <typename IntT>
nb::object array_over(nb::handle plan, std::span<const IntT> values) {
  return nb::cast(
      nb::ndarray<nb::numpy, const IntT, nb::ndim<1>>(values.data(), {values.size()}, plan));
}

using Numbers = std::span<const std::int32_t> (StepPlan::*)() const noexcept;

template <Numbers kNumbers>
nb::object numbers(nb::handle self) {
  return array_over(self, (nb::cast<const StepPlan&>(self).*kNumbers)());
}

nb::list copies(const StepPlan& plan) {
  nb::list list;
  const nb::object record = nb::getattr(runtime().records, "PageCopy");
  for (const PageCopy& copy : plan.copies())
    list.append(record(copy.source, copy.destination, copy.num_slots));
  return list;
}

nb::list holders(const Shortage& shortage) {
  nb::list list;
  const nb::object record = nb::getattr(runtime().records, "PageHolder");
  for (const PageHolder& holder : shortage.holders)
    list.append(record(holder.id, holder.num_pages, holder.num_shared_pages));
  return list;
}

void bind_shortage(nb::module_& module) {
  nb::class_<Shortage>(
      module, "Shortage",
      "What a step or a fork lacked. False in a condition.\n\n"
      "Several kinds may be short at once; those that suffice have wanted <= free.")
      .def("__bool__", [](const Shortage& /*self*/) { return false; })
      .def("__str__", &Shortage::to_string)
      .def("__repr__", [](const Shortage& self) { return "<Shortage: " + self.to_string() + ">"; })
      .def_ro("pages_wanted", &Shortage::pages_wanted, "Pages that the step would take.")
      .def_ro("pages_free", &Shortage::pages_free)
      .def_ro("pages_total", &Shortage::pages_total,
              "When pages_wanted alone exceeds it, waiting won't help.")
      .def_ro("seqs_wanted", &Shortage::seqs_wanted, "Sequences that would start.")
      .def_ro("seqs_free", &Shortage::seqs_free,
              "max_num_seqs less the live ones, paused ones included.")
      .def_ro("too_long", &Shortage::too_long,
              "A sequence would pass max_seq_len: longest_id, to longest_len tokens.")
      .def_ro("longest_id", &Shortage::longest_id)
      .def_ro("longest_len", &Shortage::longest_len, "Tokens.")
      .def_ro("max_seq_len", &Shortage::max_seq_len, "Tokens.")
      .def_prop_ro("holders", holders,
                   "Who holds the pages, when pages are short: the largest holder first.");
}

}  // namespace

void bind_plan(nb::module_& module) {
  bind_shortage(module);
  nb::class_<StepPlan> plan(
      module, "StepPlan",
      "What one step needs, in integers: made by KvCache.plan, used by every layer.\n\n"
      "Immutable, comparable by content, printable. The arrays are read-only views of the plan's "
      "own\n"
      "memory, and each keeps the plan alive. In a contiguous cache a page is the whole run of "
      "slots\n"
      "of one sequence.");
  plan.def(nb::self == nb::self)
      .def("__bool__", [](const StepPlan& /*self*/) { return true; })
      .def("__str__", &StepPlan::to_string)
      .def("__repr__",
           [](const StepPlan& self) {
             return "<StepPlan of " + std::to_string(self.num_seqs()) + " sequences, " +
                    std::to_string(self.num_tokens()) + " tokens>";
           })
      .def_prop_ro("num_seqs", &StepPlan::num_seqs)
      .def_prop_ro("num_tokens", &StepPlan::num_tokens, "All new tokens of the step.")
      .def_prop_ro("max_new_tokens", &StepPlan::max_new_tokens,
                   "The most that one sequence brings.")
      .def_prop_ro("max_kv_len", &StepPlan::max_kv_len, "The longest sequence after the step.")
      .def_prop_ro("page_size", &StepPlan::page_size, "Slots.")
      .def_prop_ro("version", &StepPlan::version, "Of the cache that made it.")
      .def_prop_ro(
          "ids",
          [](nb::handle self) { return array_over(self, nb::cast<const StepPlan&>(self).ids()); },
          "int64 [num_seqs], in batch order.")
      .def_prop_ro("rows", numbers<&StepPlan::rows>,
                   "int32 [num_seqs], the page-table row of each.")
      .def_prop_ro("token_offsets", numbers<&StepPlan::token_offsets>,
                   "int32 [num_seqs + 1], prefix sums of the new tokens.")
      .def_prop_ro("past_lens", numbers<&StepPlan::past_lens>,
                   "int32 [num_seqs], tokens before the step.")
      .def_prop_ro("kv_lens", numbers<&StepPlan::kv_lens>,
                   "int32 [num_seqs], tokens after the step.")
      .def_prop_ro("first_entries", numbers<&StepPlan::first_entries>,
                   "int32 [num_seqs]: where in its row each sequence's listed entries start.")
      .def_prop_ro("entry_offsets", numbers<&StepPlan::entry_offsets>,
                   "int32 [num_seqs + 1], prefix sums of the numbers of entries.")
      .def_prop_ro("entries", numbers<&StepPlan::entries>,
                   "int32: page ids that changed or are written to in this step.")
      .def_prop_ro("clear_lens", numbers<&StepPlan::clear_lens>,
                   "int32 [num_seqs]: slots behind the new end that the append clears.")
      .def_prop_ro("copies", copies,
                   "[PageCopy(source, destination, num_slots)]: rows that begin copies, in order.")
      .def("slot", &StepPlan::slot, nb::arg("seq_idx"), nb::arg("token_idx"),
           "The slot of new token `token_idx` of batch row `seq_idx`: page * page_size + offset.")
      .def("position", &StepPlan::position, nb::arg("seq_idx"), nb::arg("token_idx"),
           "The absolute position of that token.");
  plan.attr("__hash__") = nb::none();  // equal plans of different caches are not the same key
}

}  // namespace octavo::python
