// SPDX-License-Identifier: Apache-2.0
// Functions over a cache of the caller's own: attend, append_tokens, explain, gather_cache.
#include <fmt/format.h>
#include <octavo/attention.h>
#include <octavo/convert.h>

#include "array.h"
#include "attend_call.h"
#include "callers_step.h"
#include "errors.h"
#include "layer.h"
#include "names.h"
#include "workspace.h"

namespace octavo::python {
namespace {

enum class Half { Check, Run };

template <Half kHalf>
nb::object attend_callers(nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle kv_lens,
                          nb::handle token_offsets, nb::handle page_table, nb::handle row_indices,
                          nb::handle format, nb::handle out, nb::handle lse,
                          nb::handle softmax_scale, nb::handle mask,
                          std::pair<std::int64_t, std::int64_t> window, double softcap,
                          nb::handle sinks, nb::handle alibi_slopes, const RopeHolder* rope,
                          nb::handle positions, nb::handle backend, nb::handle compute,
                          bool batch_invariant, std::int32_t num_threads,
                          WorkspaceHolder* workspace, std::int32_t max_new_tokens,
                          std::int32_t max_kv_len, nb::handle stream) {
  AttendCall call(
      q, {k_cache, v_cache, page_table, row_indices},
      {kv_lens, token_offsets, max_new_tokens, max_kv_len, workspace}, format, {out, lse},
      {softmax_scale, mask, window, softcap, batch_invariant, backend, compute, num_threads},
      {sinks, alibi_slopes, rope, positions});
  const Stream on = stream_of(stream, call.device());
  const WorkspaceHolder::Use use(workspace);
  with_our_names([&] {
    const nb::gil_scoped_release release;
    const auto call_it = kHalf == Half::Check ? check_attend : attend;
    call_it(call.config(), call.cache(), call.step(), call.inputs(), call.out(), call.lse(), on);
  });
  return kHalf == Half::Check ? nb::none() : call.results();
}

void append_callers(nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache,
                    nb::handle kv_lens, nb::handle token_offsets, nb::handle page_table,
                    nb::handle row_indices, nb::handle format, const RopeHolder* rope,
                    nb::handle positions, std::int32_t num_threads, WorkspaceHolder* workspace,
                    std::int32_t max_new_tokens, std::int32_t max_kv_len, nb::handle stream) {
  const CallersCache cache({k_cache, v_cache, page_table, row_indices});
  const AppendCall call(k, v, cache,
                        {kv_lens, token_offsets, max_new_tokens, max_kv_len, workspace}, format,
                        rope, positions, num_threads);
  const Stream on = stream_of(stream, call.device());
  const WorkspaceHolder::Use use(workspace);
  with_our_names([&] {
    const nb::gil_scoped_release release;
    append_tokens(call.config(), cache.view(), call.step(), call.inputs(), on);
  });
}

nb::object explain_callers(nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle mask,
                           std::pair<std::int64_t, std::int64_t> window, double softcap,
                           nb::handle backend, nb::handle compute, bool batch_invariant) {
  const nb::object none = nb::none();
  AttentionConfig config =
      config_of({none, mask, window, softcap, batch_invariant, backend, compute, 0});
  const Array q_array("q", q);
  if (q_array.view().rank < 3)
    throw_mismatch("q.rank", "3 (thd) or 4 (bshd, sbhd)", fmt::to_string(q_array.view().rank));
  const CallersCache cache({k_cache, v_cache, none, none});
  set_sizes(q_array, cache.view(), config);
  LayerInputs inputs;
  inputs.q = q_array.view();
  Explanation explanation;
  with_our_names([&] { explanation = explain(config, cache.view(), inputs); });
  return explanation_of(explanation);
}

nb::object gather_callers(nb::handle k_cache, nb::handle v_cache, nb::handle kv_lens,
                          nb::handle page_table, nb::handle row_indices, std::int64_t longest,
                          nb::handle k, nb::handle v, nb::handle stream) {
  const CallersCache cache({k_cache, v_cache, page_table, row_indices});
  const Device device = cache.keys().device();
  const CallersStep step(kv_lens, cache);
  if (longest == 0) longest = step.longest_kv_len("longest");
  const std::int64_t num_seqs = step.arrays().num_seqs;
  const TensorView& keys = cache.view().k;
  const TensorView& values = cache.view().v;
  const std::int64_t k_shape[] = {num_seqs, longest, keys.shape[2], keys.shape[3]};
  const std::int64_t v_shape[] = {num_seqs, longest, values.shape[2], values.shape[3]};
  Result k_result("k", k, cache.keys(), k_shape);
  Result v_result("v", v, cache.values(), v_shape);
  const Stream on = stream_of(stream, device);
  with_our_names([&] {
    const nb::gil_scoped_release release;
    gather_cache(cache.view(), step.arrays(), k_result.view(), v_result.view(), on);
  });
  return nb::make_tuple(k_result.finish(), v_result.finish());
}

/// attend, and what has its arguments.
template <typename FunctionT>
void bind_as_attend(nb::module_& module, const char* name, FunctionT function, const char* doc) {
  module.def(
      name, function, nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("kv_lens"),
      nb::kw_only(), nb::arg("token_offsets") = nb::none(), nb::arg("page_table") = nb::none(),
      nb::arg("row_indices") = nb::none(), nb::arg("format") = "thd", nb::arg("out") = nb::none(),
      nb::arg("lse") = nb::none(), nb::arg("softmax_scale") = nb::none(),
      nb::arg("mask") = "causal", nb::arg("window") = std::pair<std::int64_t, std::int64_t>(-1, -1),
      nb::arg("softcap") = 0.0, nb::arg("sinks") = nb::none(), nb::arg("alibi_slopes") = nb::none(),
      nb::arg("rope").none() = nb::none(), nb::arg("positions") = nb::none(),
      nb::arg("backend") = "auto", nb::arg("compute") = "same", nb::arg("batch_invariant") = false,
      nb::arg("num_threads") = 0, nb::arg("workspace").none() = nb::none(),
      nb::arg("max_new_tokens") = 0, nb::arg("max_kv_len") = 0, nb::arg("stream") = nb::none(),
      doc);
}

void bind_attend(nb::module_& module) {
  bind_as_attend(
      module, "attend", attend_callers<Half::Run>,
      "Attention over a cache of the caller's own; the new tokens are already in it "
      "(append_tokens).\n\n"
      "q: [T, Hq, D] ('thd'), [B, L, Hq, D] ('bshd'), [L, B, Hq, D] ('sbhd').\n"
      "k_cache [N, P, Hk, D], v_cache [N, P, Hk, Dv]: N pages of P slots; without a page_table, N\n"
      "rows of P slots, one for each sequence. Any strides.\n"
      "kv_lens: [B] tokens of each sequence, the step's new ones included. Query i of n stands at\n"
      "position kv_len - n + i.\n"
      "token_offsets: [B + 1] prefix sums of the new tokens; None: all sequences bring equally "
      "many\n"
      "(L of bshd and sbhd, T / B of thd).\n"
      "page_table: int32 [rows, M] of page ids; entries past a sequence's last page are never "
      "read.\n"
      "row_indices: [B], which row of the page table (or of the cache) is each sequence's; None:\n"
      "row b.\n"
      "positions: [T], packed in batch order, for rope alone, which here rotates q.\n"
      "The others: see Attention and Attention.forward.\n\n"
      "Integers for the CPU may be lists, int32 arrays (not copied) or int64 arrays (copied).\n\n"
      "On a GPU all arrays lie there, the integers as int32, and no call reads them back. "
      "workspace\n"
      "is needed then, and has planned these very arrays (Workspace.plan). The rows of q are the "
      "most\n"
      "tokens that the step may have; max_new_tokens (0: as many) and max_kv_len (0: what a row "
      "can\n"
      "hold) are the most of one sequence.\n"
      "Returns out, or (out, lse) when lse is True or an array.");
  bind_as_attend(
      module, "check_attend", attend_callers<Half::Check>,
      "Raises what attend would raise for these arguments before it enqueues anything, and does\n"
      "nothing else: before an append whose tokens are not to stay without their attention. The "
      "new\n"
      "tokens need not be in the cache yet, nor, on a GPU, the step be planned; a workspace is\n"
      "needed there. Arguments: attend's.");
  module.def(
      "append_tokens", append_callers, nb::arg("k"), nb::arg("v"), nb::arg("k_cache"),
      nb::arg("v_cache"), nb::arg("kv_lens"), nb::kw_only(), nb::arg("token_offsets") = nb::none(),
      nb::arg("page_table") = nb::none(), nb::arg("row_indices") = nb::none(),
      nb::arg("format") = "thd", nb::arg("rope").none() = nb::none(),
      nb::arg("positions") = nb::none(), nb::arg("num_threads") = 0,
      nb::arg("workspace").none() = nb::none(), nb::arg("max_new_tokens") = 0,
      nb::arg("max_kv_len") = 0, nb::arg("stream") = nb::none(),
      "Writes new keys (rotated when rope is given) and values at each sequence's last "
      "positions.\n\n"
      "k [..., Hk, D] and v [..., Hk, Dv] by format; the rest as in attend. kv_lens count the new\n"
      "tokens. The dtypes of k, v and the cache may differ: f32, f16, bf16. Raises "
      "InvalidArgument\n"
      "before anything is written.");
}

}  // namespace

void bind_callers_cache(nb::module_& module) {
  bind_attend(module);
  module.def(
      "explain", explain_callers, nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache"),
      nb::kw_only(), nb::arg("mask") = "causal",
      nb::arg("window") = std::pair<std::int64_t, std::int64_t>(-1, -1), nb::arg("softcap") = 0.0,
      nb::arg("backend") = "auto", nb::arg("compute") = "same", nb::arg("batch_invariant") = false,
      "What every backend says to attend with such arguments, and which one it would take:\n"
      "an Explanation.\n\n"
      "q: [T, Hq, D], [B, L, Hq, D] or [L, B, Hq, D]. k_cache [N, P, Hk, D], v_cache\n"
      "[N, P, Hk, Dv]. Dtypes: f32, f16 or bf16; they count, as do strides, and the\n"
      "alignment of the caches. mask ... batch_invariant: as in attend. Lengths and workspace\n"
      "are not known here: attend may still pass over a backend that lacks room.\n"
      "Raises InvalidArgument for a cache or words that attend would refuse, DeviceFailure\n"
      "where the cache's GPU is not there; what a backend can't do is part of the answer.\n"
      "Enqueues nothing, and reads nothing that is in the arrays.");
  module.def(
      "gather_cache", gather_callers, nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("kv_lens"),
      nb::kw_only(), nb::arg("page_table") = nb::none(), nb::arg("row_indices") = nb::none(),
      nb::arg("longest") = 0, nb::arg("k") = nb::none(), nb::arg("v") = nb::none(),
      nb::arg("stream") = nb::none(),
      "Pages to rows: position j of sequence b goes to [b, j]; rows behind a sequence's end become "
      "0.\n\n"
      "k_cache, v_cache, kv_lens, page_table, row_indices: as in attend. Returns (k, v): [B, L, "
      "Hk, D]\n"
      "and [B, L, Hk, Dv], given or new; L of new ones is `longest` (0: the longest sequence).");
}

}  // namespace octavo::python
