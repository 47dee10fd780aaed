// SPDX-License-Identifier: Apache-2.0
// A step over a caller's cache whose like there was: what the calls have in common is kept, so that
// one call from Python plans it, appends to it and attends. For the fronts, which know calls again.
#include <octavo/convert.h>

#include <algorithm>
#include <array>
#include <optional>

#include "attend_call.h"
#include "errors.h"
#include "layer.h"
#include "names.h"
#include "workspace.h"

namespace octavo::python {
namespace {

/// Integers that all calls share.
struct Maxima {
  std::int32_t new_tokens = 0, kv_len = 0;
};

class CallAgain {
 public:
  CallAgain(WorkspaceHolder* workspace, nb::object kept, nb::object format,
            nb::object softmax_scale, nb::object mask, std::pair<std::int64_t, std::int64_t> window,
            double softcap, bool batch_invariant, nb::object backend, Maxima maxima, bool packed)
      : workspace_(workspace),
        kept_(std::move(kept)),
        format_(std::move(format)),
        softmax_scale_(std::move(softmax_scale)),
        mask_(std::move(mask)),
        backend_(std::move(backend)),
        window_(window),
        softcap_(softcap),
        batch_invariant_(batch_invariant),
        maxima_(maxima),
        packed_(packed) {}

  /// From now on calls bring new keys of `format`. same_step: their plan is that of the queries.
  void append_too(nb::object format, nb::object offsets, std::int32_t max_new_tokens,
                  std::int32_t max_kv_len, bool same_step) {
    new_format_ = std::move(format);
    new_offsets_ = std::move(offsets);
    new_maxima_ = {max_new_tokens, max_kv_len};
    same_step_ = same_step;
  }

  /// From now on calls rotate q and new keys by tables that they bring.
  void rotate(nb::object style) { rope_style_ = std::move(style); }

  /// From now on an LSE has these axes of the tokens and of the heads, all others of extent 1.
  void set_lse_axes(std::size_t token, std::size_t head) { lse_axes_ = LseAxes{token, head}; }

  void run(nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle kv_lens,
           nb::handle token_offsets, nb::handle page_table, nb::handle row_indices, nb::handle out,
           nb::handle lse, nb::handle sinks, nb::handle alibi_slopes, nb::handle cos,
           nb::handle sin, nb::handle new_k, nb::handle new_v, bool planned, nb::handle stream) {
    const nb::object none = nb::none(), same = nb::str("same");
    std::optional<RopeHolder> tables;
    if (rope_style_.is_valid()) tables.emplace(rope_style_, 0, Rope().base, cos, sin);
    const RopeHolder* rope = tables ? &*tables : nullptr;
    const AttendCall call(
        q, {k_cache, v_cache, page_table, row_indices, packed_},
        {kv_lens, token_offsets, maxima_.new_tokens, maxima_.kv_len, workspace_}, format_,
        {out, lse, lse_axes_},
        {softmax_scale_, mask_, window_, softcap_, batch_invariant_, backend_, same, 0},
        {sinks, alibi_slopes, rope, none});
    const Stream on = stream_of(stream, call.device());
    const WorkspaceHolder::Use use(workspace_);
    if (!new_k.is_none()) {
      const AppendCall append(
          new_k, new_v, call.callers_cache(),
          {kv_lens, new_offsets_, new_maxima_.new_tokens, new_maxima_.kv_len, workspace_},
          new_format_, rope, none);
      // First, since what was appended stays.
      released([&] {
        check_attend(call.config(), call.cache(), call.step(), call.inputs(), call.out(),
                     call.lse(), on);
      });
      plan(call.cache(), append.step(), on, {kv_lens, new_offsets_, page_table, row_indices});
      released([&] {
        append_tokens(append.config(), call.cache(), append.step(), append.inputs(), on);
      });
      planned = same_step_;
    }
    if (!planned)
      plan(call.cache(), call.step(), on, {kv_lens, token_offsets, page_table, row_indices});
    released([&] {
      attend(call.config(), call.cache(), call.step(), call.inputs(), call.out(), call.lse(), on);
    });
  }

 private:
  template <typename CallT>
  static void released(const CallT& call) {
    with_our_names([&] {
      const nb::gil_scoped_release release;
      call();
    });
  }

  /// Whatever becomes of the call, the workspace has planned these arrays from here on.
  void plan(const KvView& cache, const StepArrays& step, Stream on,
            const std::array<nb::handle, 4>& arrays) {
    if (workspace_ == nullptr) return;
    released([&] { workspace_->workspace().plan(cache, step, on); });
    workspace_->keep_step(nb::make_tuple(arrays[0], arrays[1], arrays[2], arrays[3]));
  }

  WorkspaceHolder* workspace_;  // null on the CPU, where nothing is planned
  nb::object kept_;             // the Workspace as a Python object
  nb::object format_, softmax_scale_, mask_, backend_;
  std::pair<std::int64_t, std::int64_t> window_;
  double softcap_;
  bool batch_invariant_;
  Maxima maxima_;
  bool packed_;
  nb::object rope_style_;
  std::optional<LseAxes> lse_axes_;

  nb::object new_format_, new_offsets_;
  Maxima new_maxima_;
  bool same_step_ = false;
};

std::int32_t entries_of(const Integers& array) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(array.size(), 0x7FFFFFFF));
}

/// Writes tokens where `seqs`, `positions` and the list of pages say, each as a sequence of its
/// own.
/// places: int32 [2 * n], overwritten; offsets: 0, 1, … n.
void append_listed(nb::handle workspace, nb::handle k, nb::handle v, nb::handle k_cache,
                   nb::handle v_cache, nb::handle seqs, nb::handle positions,
                   nb::handle page_offsets, nb::handle pages, nb::handle places,
                   nb::handle offsets) {
  auto* holder = workspace.is_none() ? nullptr : nb::cast<WorkspaceHolder*>(workspace);
  const nb::object none = nb::none();
  const CallersCache given({k_cache, v_cache, none, none});
  given.require_writable();
  const Device device = given.keys().device();
  const Integers of("batch_indices", seqs, device), at("positions", positions, device),
      ends("kv_indptr", page_offsets, device), list("kv_indices", pages, device),
      to("places", places, device), steps("offsets", offsets, device);
  const std::int64_t n = of.size();
  at.require("positions", n);
  to.require("places", 2 * n);
  steps.require("offsets", n + 1);
  auto* rows = const_cast<std::int32_t*>(to.data());
  const ListedTokens tokens{.seqs = of.data(),
                            .positions = at.data(),
                            .page_offsets = ends.data(),
                            .num_tokens = entries_of(of),
                            .num_seqs = entries_of(ends) - 1,
                            .num_pages = entries_of(list),
                            .page_size = static_cast<std::int32_t>(given.view().k.shape[1]),
                            .device = device};
  KvView cache = given.view();
  cache.page_table = list.data();
  cache.page_table_stride = 1;
  cache.num_rows = tokens.num_pages;
  cache.max_pages_per_seq = 1;
  cache.row_indices = rows;
  const StepArrays step{.num_seqs = tokens.num_tokens,
                        .num_tokens = tokens.num_tokens,
                        .token_offsets = steps.data(),
                        .kv_lens = rows + n,
                        .max_new_tokens = 1,
                        .max_kv_len = tokens.page_size,
                        .workspace = holder == nullptr ? nullptr : &holder->workspace()};
  AttentionConfig config;
  LayerInputs inputs;
  const Array k_array("k", k), v_array("v", v);
  check_token_rank("k", k_array, inputs.format);
  set_sizes(k_array, cache, config);
  config.num_q_heads = config.num_kv_heads;
  inputs.k = k_array.view();
  inputs.v = v_array.view();
  const Stream on = stream_of(none, device);
  const WorkspaceHolder::Use use(holder);
  with_our_names([&] {
    const nb::gil_scoped_release release;
    locate_tokens(tokens, rows, rows + n, on);
    if (holder != nullptr) holder->workspace().plan(cache, step, on);
  });
  if (holder != nullptr) holder->keep_step(nb::make_tuple(places, offsets, pages));
  with_our_names([&] {
    const nb::gil_scoped_release release;
    append_tokens(config, cache, step, inputs, on);
  });
}

}  // namespace

void bind_call_again(nb::module_& module) {
  module.def("_append_listed", append_listed, nb::arg("workspace").none(), nb::arg("k"),
             nb::arg("v"), nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("batch_indices"),
             nb::arg("positions"), nb::arg("kv_indptr"), nb::arg("kv_indices"), nb::arg("places"),
             nb::arg("offsets"),
             "Writes k and v [n, ..], each token where its sequence's entries of kv_indices say.\n"
             "places: int32 [2 * n], overwritten. offsets: 0, 1, ... n.");
  nb::class_<CallAgain>(module, "_CallAgain",
                        "plan, append_tokens where there are new keys, and attend, by words given "
                        "once. packed: k_cache\n"
                        "and v_cache are [tokens, heads, dim], and row_indices prefix sums of the "
                        "tokens [B + 1].")
      .def(
          "__init__",
          [](CallAgain* self, nb::object workspace, nb::object format, nb::object softmax_scale,
             nb::object mask, std::pair<std::int64_t, std::int64_t> window, double softcap,
             bool batch_invariant, nb::object backend, std::int32_t max_new_tokens,
             std::int32_t max_kv_len, bool packed) {
            auto* holder = workspace.is_none() ? nullptr : nb::cast<WorkspaceHolder*>(workspace);
            new (self)
                CallAgain(holder, std::move(workspace), std::move(format), std::move(softmax_scale),
                          std::move(mask), window, softcap, batch_invariant, std::move(backend),
                          {max_new_tokens, max_kv_len}, packed);
          },
          nb::arg("workspace").none(), nb::kw_only(), nb::arg("format"),
          nb::arg("softmax_scale").none(), nb::arg("mask"), nb::arg("window"), nb::arg("softcap"),
          nb::arg("batch_invariant"), nb::arg("backend"), nb::arg("max_new_tokens"),
          nb::arg("max_kv_len"), nb::arg("packed") = false)
      .def("append_too", &CallAgain::append_too, nb::arg("format"), nb::arg("offsets"),
           nb::arg("max_new_tokens"), nb::arg("max_kv_len"), nb::arg("same_step"),
           "From now on calls bring new keys. same_step: their plan is that of the queries.")
      .def("rotate", &CallAgain::rotate, nb::arg("style"),
           "From now on calls rotate q and new keys by tables that they bring.")
      .def("set_lse_axes", &CallAgain::set_lse_axes, nb::arg("token"), nb::arg("head"),
           "From now on an LSE has these axes of the tokens and of the heads, the others of extent "
           "1.")
      .def("run", &CallAgain::run, nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache"),
           nb::arg("kv_lens"), nb::arg("token_offsets").none(), nb::arg("page_table").none(),
           nb::arg("row_indices").none(), nb::arg("out"), nb::arg("lse").none(),
           nb::arg("sinks").none(), nb::arg("alibi_slopes").none(),
           nb::arg("cos").none() = nb::none(), nb::arg("sin").none() = nb::none(),
           nb::arg("new_k").none() = nb::none(), nb::arg("new_v").none() = nb::none(),
           nb::arg("planned") = false, nb::arg("stream") = nb::none(),
           "As the three of them with these arrays; nothing is appended unless attend takes its "
           "own.\n"
           "planned: by Workspace.plan, these very ones.");
}

}  // namespace octavo::python
