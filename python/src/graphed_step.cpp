// SPDX-License-Identifier: Apache-2.0
// The Python class GraphedStep.
#include <fmt/format.h>
#include <octavo/graphed_step.h>

#include <cstddef>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "array.h"
#include "cache.h"
#include "errors.h"
#include "layer.h"
#include "names.h"
#include "runtime.h"
#include "workspace.h"

namespace octavo::python {
namespace {

using CacheUse = CacheHolder::Use;

/// The graph, and what its replays use.
class GraphedHolder {
 public:
  GraphedHolder(const Attention& attention, nb::handle cache, const StepMaxima& maxima,
                std::span<const LayerTensors> layers, nb::object kept)
      : cache_(nb::borrow(cache)), kept_(std::move(kept)), graph_([&] {
          CacheUse use(nb::cast<CacheHolder&>(cache_));
          const nb::gil_scoped_release release;
          return GraphedStep(attention, *use, maxima, layers);
        }()) {}

  [[nodiscard]] CacheHolder& cache() { return nb::cast<CacheHolder&>(cache_); }
  [[nodiscard]] GraphedStep& graph() { return graph_; }

 private:
  nb::object cache_, kept_;
  GraphedStep graph_;  // last: gone before what it uses
};

/// One octavo.LayerTensors, read and checked.
struct Layer {
  Layer(nb::handle tensors, const Attention& attention, const StepMaxima& maxima)
      : q("q", field(tensors, "q")),
        k("k", field(tensors, "k")),
        v("v", field(tensors, "v")),
        out("out", field(tensors, "out")),
        extras(field(tensors, "sinks"), field(tensors, "alibi_slopes"), rope_of(tensors),
               field(tensors, "positions"), attention.config().num_q_heads, maxima.num_tokens,
               attention.cache_config().device) {
    view.inputs.format = format_named("format", field(tensors, "format"));
    view.inputs.q = q.view();
    view.inputs.k = k.view();
    view.inputs.v = v.view();
    extras.set(view.inputs);
    view.out = out.writable("out");
    const nb::object given = field(tensors, "lse");
    if (given.is_none()) return;
    lse = Array("lse", given);
    view.lse = lse.writable("lse");
  }

  /// An attribute; the tuple keeps what it gives.
  static nb::object field(nb::handle tensors, const char* name) {
    return nb::getattr(tensors, name);
  }
  static const RopeHolder* rope_of(nb::handle tensors) {
    const nb::object rope = field(tensors, "rope");
    if (rope.is_none()) return nullptr;
    const RopeHolder* holder = nullptr;
    if (!nb::try_cast(rope, holder)) throw_mismatch("rope", "an octavo.Rope", type_text(rope));
    return holder;
  }

  Array q, k, v, out, lse;
  LayerExtras extras;
  LayerTensors view;
};

void construct(GraphedHolder* self, const Attention& attention, nb::handle cache, nb::handle maxima,
               nb::handle layers) {
  const std::optional<StepMaxima> most = maxima_of(maxima);
  if (!most) throw_mismatch("maxima", "a StepMaxima", "None");
  if (!nb::isinstance<CacheHolder>(cache))
    throw_mismatch("cache", "an octavo.KvCache", type_text(cache));
  const nb::tuple given(nb::borrow(layers));
  const nb::handle record = nb::getattr(runtime().records, "LayerTensors").release().dec_ref();
  std::deque<Layer> read;  // its elements stay where they are
  std::vector<LayerTensors> views;
  nb::list kept;
  for (const nb::handle tensors : given) {
    if (PyObject_IsInstance(tensors.ptr(), record.ptr()) != 1) {
      throw_mismatch(fmt::format("layers[{}]", views.size()), "an octavo.LayerTensors",
                     type_text(tensors));
    }
    const Layer& layer = read.emplace_back(tensors, attention, *most);
    views.push_back(layer.view);
    for (const Array* array : {&layer.q, &layer.k, &layer.v, &layer.out})
      kept.append(array->kept());
    if (layer.view.lse) kept.append(layer.lse.kept());
  }
  kept.append(given);
  new (self) GraphedHolder(attention, cache, *most, views, std::move(kept));
}

void replay(GraphedHolder& self, const StepPlan& plan, nb::handle stream) {
  const Stream on = stream_of(stream, self.cache().config().device);
  const CacheUse use(self.cache());
  const nb::gil_scoped_release release;
  self.graph().replay(plan, on);
}

nb::object maxima_record(GraphedHolder& self) {
  const StepMaxima& m = self.graph().maxima();
  return nb::getattr(runtime().records, "StepMaxima")(m.num_seqs, m.num_tokens, m.max_new_tokens,
                                                      m.max_kv_len);
}

}  // namespace

void bind_graphed_step(nb::module_& module) {
  nb::class_<GraphedHolder>(
      module, "GraphedStep",
      "Append and attention of all layers over a GPU's KvCache, captured once as a CUDA graph.\n\n"
      "Each step is: cache.plan, cache.begin, new numbers into the inputs, replay. Lengths, pages "
      "and\n"
      "sequences may differ from step to step, within the maxima. Kernels are chosen by the "
      "maxima\n"
      "alone. Rows beyond a step write nothing to the cache and give 0, their LSE -inf.\n\n"
      "Who captures more than attention does without this class: Attention.forward with maxima, in "
      "a\n"
      "capture of his own, after the same call outside it.")
      .def("__init__", construct, nb::arg("attention"), nb::arg("cache"), nb::arg("maxima").none(),
           nb::arg("layers"),
           "Captures layer i of the cache for layers[i], a LayerTensors; enqueues nothing.\n\n"
           "maxima: a StepMaxima. Cache and tensors are kept alive.\n"
           "Raises NotCompiled in a build without CUDA; InvalidArgument for a cache that is not a "
           "GPU's,\n"
           "maxima that it can't hold, or what Attention.forward refuses; Unsupported.")
      .def("replay", replay, nb::arg("plan"), nb::arg("stream") = nb::none(),
           "Runs all layers of a step, the one that the cache began last. Raises InvalidArgument, "
           "before\n"
           "anything is enqueued, when it exceeds a maximum.")
      .def_prop_ro("maxima", maxima_record)
      .def_prop_ro(
          "backend",
          [](GraphedHolder& self) { return std::string(to_string(self.graph().backend())); },
          "The backend that was captured.");
}

}  // namespace octavo::python
