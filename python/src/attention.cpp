// SPDX-License-Identifier: Apache-2.0
// The Python classes Rope and Attention.
#include <octavo/attention.h>

#include <optional>

#include "array.h"
#include "cache.h"
#include "errors.h"
#include "layer.h"
#include "names.h"

namespace octavo::python {
namespace {

using Use = CacheHolder::Use;

void construct(Attention* self, const CacheHolder& cache, std::int32_t num_q_heads,
               nb::handle softmax_scale, nb::handle mask,
               std::pair<std::int64_t, std::int64_t> window, double softcap, bool batch_invariant,
               nb::handle backend, nb::handle compute, std::int32_t num_threads) {
  AttentionConfig config = config_of(
      {softmax_scale, mask, window, softcap, batch_invariant, backend, compute, num_threads});
  config.num_q_heads = num_q_heads;
  config.num_kv_heads = cache.config().num_kv_heads;
  config.head_dim = cache.config().head_dim;
  config.head_dim_v = cache.config().head_dim_v;
  new (self) Attention(config, cache.config());
}

nb::object forward(const Attention& self, const StepPlan& plan, CacheHolder& cache,
                   std::int32_t layer, nb::handle q, nb::handle k, nb::handle v, nb::handle format,
                   nb::handle out, nb::handle lse, nb::handle sinks, nb::handle alibi_slopes,
                   const RopeHolder* rope, nb::handle positions, nb::handle maxima,
                   nb::handle stream) {
  const AttentionConfig& config = self.config();
  const Device device = cache.config().device;
  const std::optional<StepMaxima> most = maxima_of(maxima);
  const std::int32_t num_tokens = most ? most->num_tokens : plan.num_tokens();
  LayerInputs inputs;
  inputs.maxima = most ? &*most : nullptr;
  inputs.format = format_named("format", format);
  const Array q_array("q", q), k_array("k", k), v_array("v", v);
  check_token_rank("q", q_array, inputs.format);
  const LayerExtras extras(sinks, alibi_slopes, rope, positions, config.num_q_heads, num_tokens,
                           device);
  inputs.q = q_array.view();
  inputs.k = k_array.view();
  inputs.v = v_array.view();
  extras.set(inputs);
  Result out_result("out", out, q_array, OutShape(q_array, config.head_dim_v).span());
  LseResult lse_result(lse, q_array, num_tokens, config.num_q_heads);
  const Stream on = stream_of(stream, device);
  {
    Use use(cache);
    const nb::gil_scoped_release release;
    self.forward(plan, *use, layer, inputs, out_result.view(), lse_result.view(), on);
  }
  return lse_result.beside(out_result.finish());
}

void append(const Attention& self, const StepPlan& plan, CacheHolder& cache, std::int32_t layer,
            nb::handle k, nb::handle v, nb::handle format, const RopeHolder* rope,
            nb::handle positions, nb::handle maxima, nb::handle stream) {
  const Device device = cache.config().device;
  const std::optional<StepMaxima> most = maxima_of(maxima);
  const std::int32_t num_tokens = most ? most->num_tokens : plan.num_tokens();
  LayerInputs inputs;
  inputs.maxima = most ? &*most : nullptr;
  inputs.format = format_named("format", format);
  const Array k_array("k", k), v_array("v", v);
  const LayerExtras extras({}, {}, rope, positions, 0, num_tokens, device);
  inputs.k = k_array.view();
  inputs.v = v_array.view();
  extras.set(inputs);
  const Stream on = stream_of(stream, device);
  Use use(cache);
  const nb::gil_scoped_release release;
  self.append(plan, *use, layer, inputs, on);
}

nb::object attend_begun(const Attention& self, const StepPlan& plan, CacheHolder& cache,
                        std::int32_t layer, nb::handle q, nb::handle format, nb::handle out,
                        nb::handle lse, nb::handle sinks, nb::handle alibi_slopes,
                        const RopeHolder* rope, nb::handle positions, nb::handle maxima,
                        nb::handle stream) {
  const AttentionConfig& config = self.config();
  const Device device = cache.config().device;
  const std::optional<StepMaxima> most = maxima_of(maxima);
  const std::int32_t num_tokens = most ? most->num_tokens : plan.num_tokens();
  LayerInputs inputs;
  inputs.maxima = most ? &*most : nullptr;
  inputs.format = format_named("format", format);
  const Array q_array("q", q);
  check_token_rank("q", q_array, inputs.format);
  const LayerExtras extras(sinks, alibi_slopes, rope, positions, config.num_q_heads, num_tokens,
                           device);
  inputs.q = q_array.view();
  extras.set(inputs);
  Result out_result("out", out, q_array, OutShape(q_array, config.head_dim_v).span());
  LseResult lse_result(lse, q_array, num_tokens, config.num_q_heads);
  const Stream on = stream_of(stream, device);
  {
    Use use(cache);
    const nb::gil_scoped_release release;
    self.attend(plan, *use, layer, inputs, out_result.view(), lse_result.view(), on);
  }
  return lse_result.beside(out_result.finish());
}

nb::object explain_plan(const Attention& self, const StepPlan& plan, nb::handle format) {
  return explanation_of(self.explain(plan, format_named("format", format)));
}

void bind_rope(nb::module_& module) {
  nb::class_<RopeHolder>(
      module, "Rope",
      "Rotary position embedding of q and K, fused into append and attend.\n\n"
      "Pair i at position p turns by the angle p * base ** (-2 * i / rotary_dim), or by what the\n"
      "tables hold. Pairs are (i, i + rotary_dim / 2) in style 'half', (2 * i, 2 * i + 1) in "
      "style\n"
      "'interleaved'. The rest of a head passes unturned. K is stored rotated.")
      .def(nb::init<nb::handle, std::int32_t, double, nb::handle, nb::handle>(),
           nb::arg("style") = "half", nb::arg("rotary_dim") = 0, nb::arg("base") = 10000.0,
           nb::arg("cos") = nb::none(), nb::arg("sin") = nb::none(),
           "rotary_dim: even, at most head_dim; 0 is head_dim, or what the tables say.\n"
           "cos, sin: float32 [positions, rotary_dim / 2], dense, both or neither; a position "
           "beyond\n"
           "them is refused. They are kept, not copied.")
      .def_prop_ro(
          "style",
          [](const RopeHolder& self) { return std::string(rope_style_text(self.rope().style)); })
      .def_prop_ro("rotary_dim", [](const RopeHolder& self) { return self.rope().rotary_dim; })
      .def_prop_ro("base", [](const RopeHolder& self) { return self.rope().base; });
}

void bind_calls(nb::class_<Attention>& attention) {
  attention
      .def("forward", forward, nb::arg("plan"), nb::arg("cache"), nb::arg("layer"), nb::arg("q"),
           nb::arg("k"), nb::arg("v"), nb::kw_only(), nb::arg("format") = "thd",
           nb::arg("out") = nb::none(), nb::arg("lse") = nb::none(), nb::arg("sinks") = nb::none(),
           nb::arg("alibi_slopes") = nb::none(), nb::arg("rope").none() = nb::none(),
           nb::arg("positions") = nb::none(), nb::arg("maxima") = nb::none(),
           nb::arg("stream") = nb::none(),
           "Writes a layer's new keys and values into the cache, then attends.\n\n"
           "q: [..., num_q_heads, head_dim]; k: [..., num_kv_heads, head_dim];\n"
           "v: [..., num_kv_heads, head_dim_v]. The leading axes by format: 'thd' [T] (all new "
           "tokens,\n"
           "packed in batch order), 'bshd' [num_seqs, L], 'sbhd' [L, num_seqs]; rows beyond a\n"
           "sequence's new tokens are padding, never read. Dtypes: f32, f16 or bf16 each.\n"
           "out: [..., num_q_heads, head_dim_v], f32 or q's dtype; None: a new array of q's dtype "
           "and\n"
           "framework. Padding rows become 0.\n"
           "lse: True, or a float32 array [num_tokens, num_q_heads]: natural log, sinks left out,\n"
           "packed in batch order for every format; -inf for a row that sees no key.\n"
           "sinks, alibi_slopes: float32 [num_q_heads]. rope: rotates q and the new K.\n"
           "positions: int32 [num_tokens], for rope alone; None: the plan's.\n"
           "maxima: a StepMaxima that the call is sized by instead of the step, which must lie "
           "within\n"
           "it: on a GPU a graph that captures the call then serves every such step. The tensors "
           "hold\n"
           "as many rows, lse and positions maxima.num_tokens.\n"
           "stream: on a GPU: None (PyTorch's current one, else CuPy's, else the default one), an\n"
           "address, or an object with cuda_stream or ptr.\n\n"
           "Returns out, or (out, lse) when lse is asked for. Raises InvalidArgument (nothing was\n"
           "changed), Unsupported. On the CPU the work is done on return; on a GPU it is enqueued.")
      .def("append", append, nb::arg("plan"), nb::arg("cache"), nb::arg("layer"), nb::arg("k"),
           nb::arg("v"), nb::kw_only(), nb::arg("format") = "thd",
           nb::arg("rope").none() = nb::none(), nb::arg("positions") = nb::none(),
           nb::arg("maxima") = nb::none(), nb::arg("stream") = nb::none(),
           "The first half of forward.")
      .def("attend", attend_begun, nb::arg("plan"), nb::arg("cache"), nb::arg("layer"),
           nb::arg("q"), nb::kw_only(), nb::arg("format") = "thd", nb::arg("out") = nb::none(),
           nb::arg("lse") = nb::none(), nb::arg("sinks") = nb::none(),
           nb::arg("alibi_slopes") = nb::none(), nb::arg("rope").none() = nb::none(),
           nb::arg("positions") = nb::none(), nb::arg("maxima") = nb::none(),
           nb::arg("stream") = nb::none(), "The second half of forward, over what the cache holds.")
      .def(
          "explain", explain_plan, nb::arg("plan"), nb::arg("format") = "thd",
          "What every backend says to this step, and which one forward would take: an "
          "Explanation.\n\n"
          "Shapes and dtypes are the configuration's; what tensors add (dtypes, strides) is taken\n"
          "to fit, and format changes no answer. Where a backend lacks workspace, the bytes are\n"
          "named. Raises TypeError for what is no plan. Enqueues nothing, waits for nothing.");
}

}  // namespace

void bind_attention(nb::module_& module) {
  bind_rope(module);
  nb::class_<Attention> attention(
      module, "Attention",
      "Attention with one configuration, over caches like the one it was made for.\n\n"
      "Holds no tensors. Order of the maths: scale, softcap, ALiBi, mask, softmax, sink.");
  attention.def(
      "__init__", construct, nb::arg("cache"), nb::kw_only(), nb::arg("num_q_heads"),
      nb::arg("softmax_scale") = nb::none(), nb::arg("mask") = "causal",
      nb::arg("window") = std::pair<std::int64_t, std::int64_t>(-1, -1), nb::arg("softcap") = 0.0,
      nb::arg("batch_invariant") = false, nb::arg("backend") = "auto", nb::arg("compute") = "same",
      nb::arg("num_threads") = 0,
      "num_q_heads: a multiple of the cache's num_kv_heads.\n"
      "softmax_scale: None is 1 / sqrt(head_dim).\n"
      "mask: 'causal' (keys at positions up to the query's own) or 'full'.\n"
      "window: (left, right): keys at p - left ... p + right; -1 is no bound.\n"
      "softcap: c > 0 turns a scaled logit s into c * tanh(s / c).\n"
      "batch_invariant: a sequence's bits don't depend on its batch mates.\n"
      "backend: 'auto', or one of octavo.backends(). compute: 'same' or 'fp8'.\n"
      "num_threads: of the CPU backends; 0 is OpenMP's default.\n\n"
      "Raises InvalidArgument; Unsupported, with what is missing, when the backend cannot\n"
      "run it.");
  bind_calls(attention);
}

}  // namespace octavo::python
