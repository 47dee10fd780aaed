// SPDX-License-Identifier: Apache-2.0
#include "workspace.h"

#include <octavo/workspace.h>

#include "array.h"
#include "attend_call.h"
#include "errors.h"
#include "layer.h"
#include "names.h"
#include "runtime.h"

namespace octavo::python {
namespace {

nb::object sizes(WorkspaceHolder& self, nb::handle q, nb::handle k_cache, nb::handle v_cache,
                 nb::handle kv_lens, nb::handle token_offsets, nb::handle page_table,
                 nb::handle row_indices, nb::handle format, nb::handle out, nb::handle lse,
                 nb::handle mask, std::pair<std::int64_t, std::int64_t> window, double softcap,
                 nb::handle sinks, nb::handle alibi_slopes, const RopeHolder* rope,
                 nb::handle positions, nb::handle backend, nb::handle compute, bool batch_invariant,
                 std::int32_t max_new_tokens, std::int32_t max_kv_len) {
  const nb::object none = nb::none();
  const AttendCall call(q, {k_cache, v_cache, page_table, row_indices},
                        {kv_lens, token_offsets, max_new_tokens, max_kv_len, &self}, format,
                        {out, lse},
                        {none, mask, window, softcap, batch_invariant, backend, compute, 0},
                        {sinks, alibi_slopes, rope, positions});
  WorkspaceSizes s;
  const WorkspaceHolder::Use use(&self);
  with_our_names([&] {
    const nb::gil_scoped_release release;
    s = self.workspace().sizes(call.config(), call.cache(), call.step(), call.inputs(), call.out(),
                               call.lse());
  });
  return nb::getattr(runtime().records, "WorkspaceSizes")(s.least, s.good);
}

void use_memory(WorkspaceHolder& self, nb::handle memory) {
  const Memory bytes = read_memory("memory", memory);
  if (bytes.rank != 1 || bytes.strides[0] != 1)
    throw_mismatch("memory.shape", "one dense axis", shape_text(bytes));
  if (bytes.read_only) throw_mismatch("memory", "a writable array", "a read-only one");
  if (bytes.device != self.device())
    throw_mismatch("memory.device", device_text(self.device()), device_text(bytes.device));
  const WorkspaceHolder::Use use(&self);
  self.workspace().use(bytes.data, bytes.shape[0] * bytes.bytes);
  self.keep_memory(nb::make_tuple(memory, bytes.keeper_or_none()));
}

void plan(WorkspaceHolder& self, nb::handle k_cache, nb::handle v_cache, nb::handle kv_lens,
          nb::handle token_offsets, std::int32_t num_tokens, nb::handle page_table,
          nb::handle row_indices, std::int32_t max_new_tokens, std::int32_t max_kv_len,
          nb::handle stream) {
  const CallersCache cache({k_cache, v_cache, page_table, row_indices});
  const Device device = cache.keys().device();
  if (device != self.device())
    throw_mismatch("k_cache.device", device_text(self.device()), device_text(device));
  const CallersStep step({kv_lens, token_offsets, max_new_tokens, max_kv_len, &self}, num_tokens,
                         cache);
  const Stream on = stream_of(stream, device);
  const WorkspaceHolder::Use use(&self);
  with_our_names([&] {
    const nb::gil_scoped_release release;
    self.workspace().plan(cache.view(), step.arrays(), on);
  });
  self.keep_step(nb::make_tuple(kv_lens, token_offsets, page_table, row_indices));
}

void check(WorkspaceHolder& self, nb::handle stream) {
  const Stream on = stream_of(stream, self.device());
  const WorkspaceHolder::Use use(&self);
  with_our_names([&] {
    const nb::gil_scoped_release release;
    self.workspace().check(on);
  });
}

void bind_sizes(nb::class_<WorkspaceHolder>& workspace) {
  workspace.def(
      "sizes", sizes, nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("kv_lens"),
      nb::kw_only(), nb::arg("token_offsets") = nb::none(), nb::arg("page_table") = nb::none(),
      nb::arg("row_indices") = nb::none(), nb::arg("format") = "thd", nb::arg("out") = nb::none(),
      nb::arg("lse") = nb::none(), nb::arg("mask") = "causal",
      nb::arg("window") = std::pair<std::int64_t, std::int64_t>(-1, -1), nb::arg("softcap") = 0.0,
      nb::arg("sinks") = nb::none(), nb::arg("alibi_slopes") = nb::none(),
      nb::arg("rope").none() = nb::none(), nb::arg("positions") = nb::none(),
      nb::arg("backend") = "auto", nb::arg("compute") = "same", nb::arg("batch_invariant") = false,
      nb::arg("max_new_tokens") = 0, nb::arg("max_kv_len") = 0,
      "Bytes that such a call of attend takes, the plan included: WorkspaceSizes.\n\n"
      "Arguments: attend's. Of the arrays shapes and places are looked at, never what is in them.\n"
      "Builds what the backend prepares for such calls, so it comes before a capture.");
}

}  // namespace

WorkspaceHolder::Use::Use(WorkspaceHolder* holder) : holder_(holder) {
  if (holder == nullptr) return;
  if (holder->busy_)
    throw_mismatch("workspace", "one thread at a time", "a call while another one runs");
  holder->busy_ = true;
}

WorkspaceHolder::Use::~Use() {
  if (holder_ != nullptr) holder_->busy_ = false;
}

void bind_workspace(nb::module_& module) {
  nb::class_<WorkspaceHolder> workspace(
      module, "Workspace",
      "Memory and the planned step for attention over a cache of the caller's in a GPU's "
      "memory.\n\n"
      "Once: sizes, then use with so many bytes. A step is: plan, then append_tokens and attend "
      "for\n"
      "each layer with workspace=. All of it may be captured in a CUDA graph, plan included, "
      "which\n"
      "then serves every step within the maxima whose arrays lie at the same places; calls outside "
      "the\n"
      "graph plan again after a replay. Work that uses one workspace is ordered, by one stream or "
      "by\n"
      "events. For one thread at a time.");
  workspace.def(
      "__init__",
      [](WorkspaceHolder* self, nb::handle device) {
        new (self) WorkspaceHolder(device_named("device", device));
      },
      nb::arg("device") = "cuda",
      "device: 'cuda' or 'cuda:N'. Raises NotCompiled in a build without CUDA, InvalidArgument "
      "for\n"
      "the CPU, which needs none, DeviceFailure when there is no GPU.");
  bind_sizes(workspace);
  workspace
      .def("use", use_memory, nb::arg("memory"),
           "Memory of the device for all calls from now on: one dense axis, aligned to 256 bytes. "
           "Kept\n"
           "alive until the next use; it must also outlive the work that was enqueued with it.")
      .def("plan", plan, nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("kv_lens"), nb::kw_only(),
           nb::arg("token_offsets").none(), nb::arg("num_tokens"),
           nb::arg("page_table") = nb::none(), nb::arg("row_indices") = nb::none(),
           nb::arg("max_new_tokens") = 0, nb::arg("max_kv_len") = 0, nb::arg("stream") = nb::none(),
           "Reads the step's arrays on the device and plans it for all layers. One launch, no "
           "wait.\n\n"
           "k_cache, v_cache: any layer's. kv_lens, token_offsets, page_table, row_indices: as in\n"
           "attend, int32 on the device; kept alive until the next plan.\n"
           "num_tokens: the most of the step: T of q and k, or B * L of bshd and sbhd.\n"
           "max_new_tokens, max_kv_len: as in attend, and the same there.\n\n"
           "A sequence with a wrong row, length or page id is taken to be empty: it writes nothing "
           "and\n"
           "gives 0 and -inf. Wrong offsets make the whole step empty. check names the fault.")
      .def("check", check, nb::arg("stream") = nb::none(),
           "Raises InvalidArgument for the first fault of the step planned last. Waits for the\n"
           "stream: for debugging, and not under capture.")
      .def_prop_ro("device",
                   [](const WorkspaceHolder& self) { return device_text(self.device()); });
}

}  // namespace octavo::python
