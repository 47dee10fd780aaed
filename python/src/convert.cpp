// SPDX-License-Identifier: Apache-2.0
// The functions merge and convert_tokens.
#include <octavo/convert.h>

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <octavo/merge.h>

#include <algorithm>
#include <vector>

#include "array.h"
#include "callers_step.h"
#include "errors.h"
#include "layer.h"
#include "names.h"

namespace octavo::python {
namespace {

struct PartialArrays {
  Array out, lse;
  nb::object kept_out, kept_lse;
};

std::vector<PartialArrays> read_partials(nb::handle partials) {
  std::vector<PartialArrays> arrays;
  for (const nb::handle pair : nb::iter(partials)) {
    const std::string name = fmt::format("partials[{}]", arrays.size());
    if (PySequence_Check(pair.ptr()) == 0 || PySequence_Size(pair.ptr()) != 2) {
      PyErr_Clear();
      throw_mismatch(name, "a pair (out, lse)", type_text(pair));
    }
    nb::object out = nb::steal(PySequence_GetItem(pair.ptr(), 0));
    nb::object lse = nb::steal(PySequence_GetItem(pair.ptr(), 1));
    if (!out.is_valid() || !lse.is_valid()) throw nb::python_error();
    arrays.push_back({Array(name + ".out", out), Array(name + ".lse", lse), out, lse});
  }
  return arrays;
}

nb::object merge_partials(nb::handle partials, nb::handle out, nb::handle lse, nb::handle sinks,
                          nb::handle stream) {
  const nb::object kept = nb::steal(PySequence_Tuple(partials.ptr()));
  if (!kept.is_valid()) {
    PyErr_Clear();
    throw_mismatch("partials", "a list of pairs (out, lse)", type_text(partials));
  }
  const std::vector<PartialArrays> arrays = read_partials(kept);
  if (arrays.empty()) throw_mismatch("partials", "at least 1", "0");
  const Array& like = arrays.front().out;
  if (like.view().rank != 3)
    throw_mismatch("partials[0].out.rank", "3", fmt::to_string(like.view().rank));
  const std::span<const std::int64_t> shape(like.view().shape.data(), 3);
  const Device device = like.device();
  if (device.type != DeviceType::Cpu)
    throw_mismatch("partials[0].out.device", "cpu", device_text(device),
                   "partials are merged on the host alone");
  const float* sink_values = floats("sinks", sinks, shape[1], device);
  Result out_result("out", out, like, shape);
  LseResult lse_result(lse, like, shape[0], shape[1]);
  std::vector<Partial> views;
  views.reserve(arrays.size());
  for (const PartialArrays& array : arrays) views.push_back({array.out.view(), array.lse.view()});
  const Stream on = stream_of(stream, device);
  {
    const nb::gil_scoped_release release;
    merge(views, out_result.view(), lse_result.view(), sink_values, on);
  }
  return lse_result.beside(out_result.finish());
}

struct TokenShape {
  std::int64_t axes[4] = {};
  std::size_t rank = 0;
};

TokenShape token_shape(TensorFormat format, std::int64_t num_tokens, std::int64_t num_seqs,
                       std::int64_t longest, const Array& x) {
  const std::size_t rank = static_cast<std::size_t>(x.view().rank);
  const std::int64_t heads = x.view().shape[rank - 2];
  const std::int64_t dim = x.view().shape[rank - 1];
  if (format == TensorFormat::Thd) return {{num_tokens, heads, dim, 0}, 3};
  if (format == TensorFormat::Bshd) return {{num_seqs, longest, heads, dim}, 4};
  return {{longest, num_seqs, heads, dim}, 4};
}

std::int64_t longest_new(const TokenOffsets& offsets) {
  std::int32_t longest = 0;
  for (std::int32_t b = 0; b < offsets.num_seqs(); ++b)
    longest = std::max(longest, offsets.data()[b + 1] - offsets.data()[b]);
  return longest;
}

nb::object convert(nb::handle x, nb::handle from_format, nb::handle to_format,
                   nb::handle token_offsets, nb::handle out, std::int64_t longest,
                   nb::handle stream) {
  const TensorFormat from = format_named("from_format", from_format);
  const TensorFormat to = format_named("to_format", to_format);
  const Array array("x", x);
  const TokenOffsets offsets(token_offsets, "x", array, from, -1);
  const bool on_host = array.device().type == DeviceType::Cpu;
  if (!on_host && out.is_none() && (to == TensorFormat::Thd || longest == 0)) {
    throw_mismatch(to == TensorFormat::Thd ? "out" : "longest", "given on a GPU", "nothing",
                   "the host doesn't see token_offsets");
  }
  if (on_host && longest == 0) longest = longest_new(offsets);
  if (longest < 0 || offsets.num_tokens() < 0)
    throw_mismatch("longest and token_offsets", "at least 0", "less");
  const TokenShape shape =
      token_shape(to, offsets.num_tokens(), offsets.num_seqs(), longest, array);
  Result result("out", out, array, {shape.axes, shape.rank});
  StepArrays step;
  step.num_seqs = offsets.num_seqs();
  step.num_tokens = offsets.num_tokens();
  step.token_offsets = offsets.data();
  const Stream on = stream_of(stream, array.device());
  {
    const nb::gil_scoped_release release;
    octavo::convert_tokens(array.view(), from, result.view(), to, step, on);
  }
  return result.finish();
}

}  // namespace

void bind_convert(nb::module_& module) {
  module.def(
      "merge", merge_partials, nb::arg("partials"), nb::kw_only(), nb::arg("out") = nb::none(),
      nb::arg("lse") = nb::none(), nb::arg("sinks") = nb::none(), nb::arg("stream") = nb::none(),
      "Merges partial results, attention over parts of the keys, into attention over all of "
      "them.\n\n"
      "partials: [(out, lse), ...]: out [T, H, Dv] of f32, f16 or bf16, lse float32 [T, H], "
      "natural\n"
      "log, computed without sinks. (0, -inf) is the neutral element. sinks: float32 [H], applied\n"
      "once, last. out: given, or new like the first partial's; lse: True, or float32 [T, H].\n"
      "On the CPU. Returns out, or (out, lse) when lse is asked for.");
  module.def("convert_tokens", convert, nb::arg("x"), nb::arg("from_format"), nb::arg("to_format"),
             nb::kw_only(), nb::arg("token_offsets") = nb::none(), nb::arg("out") = nb::none(),
             nb::arg("longest") = 0, nb::arg("stream") = nb::none(),
             "Copies new tokens [..., heads, dim] from one format to another, converting the dtype "
             "to out's.\n\n"
             "Padding of the result becomes 0; padding of x is never read. token_offsets: "
             "[num_seqs + 1];\n"
             "None: all sequences bring equally many (x in bshd or sbhd). A new out has x's dtype "
             "and, padded,\n"
             "L = longest (0: the most new tokens of a sequence).");
}

}  // namespace octavo::python
