// SPDX-License-Identifier: Apache-2.0
#include "cache.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>
#include <octavo/convert.h>

#include <string>
#include <utility>

#include "array.h"
#include "cache_config.h"
#include "errors.h"
#include "names.h"
#include "runtime.h"

namespace octavo::python {
namespace {

using Use = CacheHolder::Use;

// ---- steps
// ---------------------------------------------------------------------------------------

void add_step(std::vector<SequenceStep>& steps, nb::handle id, nb::handle new_tokens) {
  steps.push_back({whole_number("step: an id", id), whole_number("step: new tokens", new_tokens)});
}

void add_pair(std::vector<SequenceStep>& steps, nb::handle pair) {
  if (PyTuple_Check(pair.ptr()) && PyTuple_Size(pair.ptr()) == 2) {
    add_step(steps, PyTuple_GetItem(pair.ptr(), 0), PyTuple_GetItem(pair.ptr(), 1));
    return;
  }
  if (PySequence_Check(pair.ptr()) == 0 || PySequence_Size(pair.ptr()) != 2) {
    PyErr_Clear();
    throw_mismatch("step", "pairs (id, new tokens), or a dict of them", type_text(pair));
  }
  add_step(steps, nb::steal(PySequence_GetItem(pair.ptr(), 0)),
           nb::steal(PySequence_GetItem(pair.ptr(), 1)));
}

void read_steps(nb::handle step, std::vector<SequenceStep>& steps) {
  steps.clear();
  if (PyDict_Check(step.ptr())) {
    Py_ssize_t place = 0;
    PyObject *id = nullptr, *new_tokens = nullptr;
    while (PyDict_Next(step.ptr(), &place, &id, &new_tokens) != 0) add_step(steps, id, new_tokens);
    return;
  }
  nb::object pairs = nb::borrow(step);
  if (nb::hasattr(step, "items")) pairs = nb::getattr(step, "items")();
  const nb::object iterator = nb::steal(PyObject_GetIter(pairs.ptr()));
  if (!iterator.is_valid()) {
    PyErr_Clear();
    throw_mismatch("step", "pairs (id, new tokens), or a dict of them", type_text(step));
  }
  while (true) {
    const nb::object pair = nb::steal(PyIter_Next(iterator.ptr()));
    if (!pair.is_valid()) break;
    add_pair(steps, pair);
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
}

PlanOutcome outcome_of(CacheHolder& self, nb::handle step) {
  std::vector<SequenceStep> steps;
  {
    const Use use(self);
    steps.swap(self.steps);
  }
  // Python code may run here: an iterator of the caller's.
  read_steps(step, steps);
  Use use(self);
  PlanOutcome outcome = [&] {
    const nb::gil_scoped_release release;
    return use->plan(steps);
  }();
  self.steps.swap(steps);
  return outcome;
}

StepPlan plan(CacheHolder& self, nb::handle step) {
  PlanOutcome outcome = outcome_of(self, step);
  if (!outcome) raise_cache_full(outcome.shortage());
  return std::move(outcome).plan();
}

nb::object try_plan(CacheHolder& self, nb::handle step) {
  PlanOutcome outcome = outcome_of(self, step);
  return outcome ? nb::cast(std::move(outcome).plan()) : nb::cast(outcome.shortage());
}

void begin(CacheHolder& self, const StepPlan& plan, nb::handle stream) {
  const Stream on = stream_of(stream, self.config().device);
  Use use(self);
  const nb::gil_scoped_release release;
  use->begin(plan, on);
}

void fork(CacheHolder& self, SequenceId source, SequenceId to) {
  const ForkOutcome outcome = Use(self)->fork(source, to);
  if (!outcome) raise_cache_full(outcome.shortage());
}

nb::object try_fork(CacheHolder& self, SequenceId source, SequenceId to) {
  const ForkOutcome outcome = Use(self)->fork(source, to);
  return outcome ? nb::none() : nb::cast(outcome.shortage());
}

// ---- what it holds
// -------------------------------------------------------------------------------

nb::object stats(CacheHolder& self) {
  const CacheStats s = Use(self)->stats();
  return nb::getattr(runtime().records, "CacheStats")(s.num_seqs, s.num_tokens, s.pages_total,
                                                      s.pages_used, s.pages_free, s.pages_shared,
                                                      s.slots_used, s.slots_wasted, s.bytes);
}

nb::object storage_array(nb::handle self, const TensorView& view) {
  constexpr std::uint8_t kUint = 1, kFloat = 2, kBfloat = 4;
  const bool on_host = view.device.type == DeviceType::Cpu;
  const bool is_bfloat = view.dtype == DType::BF16;
  nb::dlpack::dtype dtype;
  dtype.code = is_bfloat ? (on_host ? kUint : kBfloat) : kFloat;
  dtype.bits = static_cast<std::uint8_t>(8 * dtype_bytes(view.dtype));
  dtype.lanes = 1;
  std::size_t shape[kMaxRank] = {};
  for (std::int32_t axis = 0; axis < view.rank; ++axis)
    shape[axis] = static_cast<std::size_t>(view.shape[static_cast<std::size_t>(axis)]);
  const auto rank = static_cast<std::size_t>(view.rank);
  if (!on_host) {
    return nb::cast(nb::ndarray<nb::array_api>(view.data, rank, shape, self, view.strides.data(),
                                               dtype, nb::device::cuda::value, view.device.index));
  }
  nb::object array =
      nb::cast(nb::ndarray<nb::numpy>(view.data, rank, shape, self, view.strides.data(), dtype));
  return is_bfloat ? nb::getattr(runtime().results, "as_bfloat16")(array) : array;
}

nb::object key_storage(nb::handle self, std::int32_t layer) {
  return storage_array(self, Use(nb::cast<CacheHolder&>(self))->key_storage(layer));
}

nb::object value_storage(nb::handle self, std::int32_t layer) {
  return storage_array(self, Use(nb::cast<CacheHolder&>(self))->value_storage(layer));
}

nb::object gather(nb::handle self, const StepPlan& plan, std::int32_t layer, nb::handle k,
                  nb::handle v, nb::handle stream) {
  auto& holder = nb::cast<CacheHolder&>(self);
  const CacheConfig& config = holder.config();
  // New arrays are made like the storage: on a GPU that would be of no framework's.
  nb::object storage;
  Array like;
  if (config.device.type == DeviceType::Cpu) {
    storage = key_storage(self, layer);
    like = Array("storage", storage);
  } else {
    for (const auto& [name, given] : {std::pair("k", k), std::pair("v", v)}) {
      if (given.is_none())
        throw_mismatch(name, "an array on " + device_text(config.device), "None");
    }
  }
  const std::int64_t k_shape[] = {plan.num_seqs(), plan.max_kv_len(), config.num_kv_heads,
                                  config.head_dim};
  const std::int64_t v_shape[] = {plan.num_seqs(), plan.max_kv_len(), config.num_kv_heads,
                                  config.head_dim_v};
  Result k_result("k", k, like, k_shape);
  Result v_result("v", v, like, v_shape);
  const Stream on = stream_of(stream, config.device);
  {
    Use use(holder);
    const nb::gil_scoped_release release;
    gather_cache(plan, *use, layer, k_result.view(), v_result.view(), on);
  }
  return nb::make_tuple(k_result.finish(), v_result.finish());
}

void bind_config(nb::class_<CacheHolder>& cache) {
  const auto number = [&cache](const char* name, auto member) {
    cache.def_prop_ro(name, [member](const CacheHolder& self) { return self.config().*member; });
  };
  number("num_layers", &CacheConfig::num_layers);
  number("num_kv_heads", &CacheConfig::num_kv_heads);
  number("head_dim", &CacheConfig::head_dim);
  number("head_dim_v", &CacheConfig::head_dim_v);
  number("page_size", &CacheConfig::page_size);
  number("num_pages", &CacheConfig::num_pages);
  number("max_num_seqs", &CacheConfig::max_num_seqs);
  number("max_seq_len", &CacheConfig::max_seq_len);
  cache
      .def_prop_ro(
          "dtype",
          [](const CacheHolder& self) { return std::string(to_string(self.config().dtype)); })
      .def_prop_ro(
          "kind",
          [](const CacheHolder& self) { return std::string(to_string(self.config().kind)); })
      .def_prop_ro("device",
                   [](const CacheHolder& self) { return device_text(self.config().device); });
}

void bind_steps(nb::class_<CacheHolder>& cache) {
  cache
      .def("plan", plan, nb::arg("step"),
           "Takes the slots that a step needs, in all layers, or nothing at all.\n\n"
           "step: {id: new tokens} or [(id, new tokens), ...], in batch order. An unknown id "
           "starts a\n"
           "sequence; one that is not listed pauses and keeps its tokens.\n\n"
           "Raises CacheFull, with .shortage, when pages, sequences or max_seq_len don't suffice: "
           "the\n"
           "cache is then exactly as before. Raises InvalidArgument for a repeated id, a negative\n"
           "count, or a count that max_seq_len alone rules out.")
      .def("try_plan", try_plan, nb::arg("step"),
           "As plan, but returns the Shortage (false in a condition) instead of raising CacheFull.")
      .def(
          "undo", [](CacheHolder& self, const StepPlan& plan) { Use(self)->undo(plan); },
          nb::arg("plan"),
          "Takes back the newest plan, not yet begun, as if it had never been made.")
      .def(
          "begin", begin, nb::arg("plan"), nb::arg("stream") = nb::none(),
          "Makes the plan current: uploads its page-table entries, runs its page copies.\n\n"
          "Once a step, before its first layer. On a GPU it enqueues on `stream` (None: PyTorch's\n"
          "current one, else CuPy's, else the default one).")
      .def(
          "release", [](CacheHolder& self, SequenceId id) { Use(self)->release(id); },
          nb::arg("id"), "Ends a sequence and gives its pages back.")
      .def(
          "truncate",
          [](CacheHolder& self, SequenceId id, std::int64_t length) {
            Use(self)->truncate(id, length);
          },
          nb::arg("id"), nb::arg("length"),
          "Cuts a sequence back to its first `length` tokens; 0 keeps the id alive.")
      .def("fork", fork, nb::arg("source"), nb::arg("to"),
           "Starts the sequence `to` with the whole past of `source`.\n\n"
           "Paged: pages are shared, and the first write to a shared page copies it. Contiguous: "
           "takes\n"
           "a run of slots now; the next plan lists the copy. Raises CacheFull when no sequence is "
           "free.")
      .def("try_fork", try_fork, nb::arg("source"), nb::arg("to"),
           "As fork, but returns the Shortage, or None when done.");
}

void bind_contents(nb::class_<CacheHolder>& cache) {
  cache
      .def(
          "__contains__", [](CacheHolder& self, SequenceId id) { return Use(self)->contains(id); },
          nb::arg("id"))
      .def("__len__", [](CacheHolder& self) { return Use(self)->sequence_ids().size(); })
      .def("__bool__", [](CacheHolder& /*self*/) { return true; })  // an empty cache is one, too
      .def(
          "length", [](CacheHolder& self, SequenceId id) { return Use(self)->length(id); },
          nb::arg("id"), "Tokens of a sequence.")
      .def(
          "page_ids", [](CacheHolder& self, SequenceId id) { return Use(self)->page_ids(id); },
          nb::arg("id"), "The pages of a sequence, in order of position.")
      .def(
          "sequence_ids", [](CacheHolder& self) { return Use(self)->sequence_ids(); },
          "All live sequences, ascending.")
      .def("stats", stats, "The cache's use at this moment, as CacheStats.")
      .def(
          "audit", [](CacheHolder& self) { Use(self)->audit(); },
          "Raises Internal when the counts, tables and lists do not agree: for tests.")
      .def("key_storage", key_storage, nb::arg("layer"),
           "A layer's keys, writable and not copied: [num_pages, page_size, num_kv_heads, "
           "head_dim];\n"
           "contiguous: [max_num_seqs, max_seq_len, ...].\n\n"
           "A NumPy array on the CPU (bf16: of ml_dtypes.bfloat16 where that is installed, else a\n"
           "TypedArray); an object with __dlpack__ on a GPU. Keeps the cache alive.")
      .def("value_storage", value_storage, nb::arg("layer"),
           "A layer's values; as key_storage, with head_dim_v.")
      .def("gather", gather, nb::arg("plan"), nb::arg("layer"), nb::arg("k") = nb::none(),
           nb::arg("v") = nb::none(), nb::arg("stream") = nb::none(),
           "Keys and values of the begun step's sequences as rows: position j of sequence b at [b, "
           "j].\n\n"
           "Returns (k, v): [num_seqs, max_kv_len, num_kv_heads, head_dim] and head_dim_v; rows "
           "behind\n"
           "a sequence's end are 0. On a GPU k and v must be given.")
      .def_prop_ro(
          "version", [](CacheHolder& self) { return Use(self)->version(); },
          "Grows with every plan, undo, release, fork and truncate.");
}

}  // namespace

CacheHolder::CacheHolder(const CacheConfig& config, std::vector<nb::object> kept)
    : cache_(config), kept_(std::move(kept)) {}

CacheHolder::Use::Use(CacheHolder& holder) : holder_(holder) {
  if (holder.busy_)
    throw_mismatch("cache", "one thread at a time", "a call while another one runs");
  holder.busy_ = true;
}

void bind_cache(nb::module_& module) {
  nb::class_<CacheHolder> cache(
      module, "KvCache",
      "Keys and values of many growing sequences, for all layers, paged or contiguous.\n\n"
      "A step is: plan, begin, then Attention.forward for each layer. One thread at a time may use "
      "a\n"
      "cache; different caches are independent.");
  bind_cache_sizes(module, cache);
  bind_steps(cache);
  bind_contents(cache);
  bind_config(cache);
}

}  // namespace octavo::python
