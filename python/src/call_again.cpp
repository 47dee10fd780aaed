// SPDX-License-Identifier: Apache-2.0
// A step over a caller's cache whose like there was: what the calls have in common is kept, so that
// one call from Python plans it, appends to it and attends. For the fronts, which know calls again.
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

  void run(nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle kv_lens,
           nb::handle token_offsets, nb::handle page_table, nb::handle row_indices, nb::handle out,
           nb::handle lse, nb::handle sinks, nb::handle alibi_slopes, const RopeHolder* rope,
           nb::handle new_k, nb::handle new_v, bool planned) {
    const nb::object none = nb::none(), same = nb::str("same");
    const AttendCall call(
        q, {k_cache, v_cache, page_table, row_indices, packed_},
        {kv_lens, token_offsets, maxima_.new_tokens, maxima_.kv_len, workspace_}, format_, out, lse,
        {softmax_scale_, mask_, window_, softcap_, batch_invariant_, backend_, same, 0},
        {sinks, alibi_slopes, rope, none});
    const Stream on = stream_of(none, call.device());
    const WorkspaceHolder::Use use(workspace_);
    const bool appends = !new_k.is_none();
    if (appends) {
      const AppendCall append(
          new_k, new_v, call.callers_cache(),
          {kv_lens, new_offsets_, new_maxima_.new_tokens, new_maxima_.kv_len, workspace_},
          new_format_, rope, none);
      with_our_names([&] {
        const nb::gil_scoped_release release;
        plan(call.cache(), append.step(), on);
        append_tokens(append.config(), call.cache(), append.step(), append.inputs(), on);
      });
      planned = same_step_;
    }
    with_our_names([&] {
      const nb::gil_scoped_release release;
      if (!planned) plan(call.cache(), call.step(), on);
      attend(call.config(), call.cache(), call.step(), call.inputs(), call.out(), call.lse(), on);
    });
    if (workspace_ == nullptr || (planned && !appends)) return;
    workspace_->keep_step(nb::make_tuple(
        kv_lens, planned ? new_offsets_ : nb::borrow(token_offsets), page_table, row_indices));
  }

 private:
  void plan(const KvView& cache, const StepArrays& step, Stream on) {
    if (workspace_ != nullptr) workspace_->workspace().plan(cache, step, on);
  }

  WorkspaceHolder* workspace_;  // null on the CPU, where nothing is planned
  nb::object kept_;             // the Workspace as a Python object
  nb::object format_, softmax_scale_, mask_, backend_;
  std::pair<std::int64_t, std::int64_t> window_;
  double softcap_;
  bool batch_invariant_;
  Maxima maxima_;
  bool packed_;

  nb::object new_format_, new_offsets_;
  Maxima new_maxima_;
  bool same_step_ = false;
};

}  // namespace

void bind_call_again(nb::module_& module) {
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
      .def("run", &CallAgain::run, nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache"),
           nb::arg("kv_lens"), nb::arg("token_offsets").none(), nb::arg("page_table").none(),
           nb::arg("row_indices").none(), nb::arg("out"), nb::arg("lse").none(),
           nb::arg("sinks").none(), nb::arg("alibi_slopes").none(), nb::arg("rope").none(),
           nb::arg("new_k").none() = nb::none(), nb::arg("new_v").none() = nb::none(),
           nb::arg("planned") = false,
           "As the three of them with these arrays. planned: by Workspace.plan, these very ones.");
}

}  // namespace octavo::python
