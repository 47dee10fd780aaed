// SPDX-License-Identifier: Apache-2.0
#include <octavo/merge.h>

#include <vector>

#include "api/tensors.h"
#include "base/error.h"
#include "dispatch/run.h"

namespace octavo {
namespace {

kernels::cpu::MergeTensor merge_tensor(const ConstTensorView& view) {
  return {view.data, view.dtype, view.strides[0], view.strides[1], view.strides[2]};
}

void check_out(const char* name, const ConstTensorView& view) {
  api::check_tensor(name, view, 3);
  if (view.dtype != DType::F32 && view.dtype != DType::F16 && view.dtype != DType::BF16) {
    base::throw_mismatch(fmt::format("{}.dtype", name), "f32, f16 or bf16", to_string(view.dtype));
  }
}

void check_lse(const char* name, const ConstTensorView& view, const TensorView& out) {
  api::check_tensor(name, view, 2);
  if (view.dtype != DType::F32)
    base::throw_mismatch(fmt::format("{}.dtype", name), "f32", to_string(view.dtype));
  api::check_extent(name, view, 0, out.shape[0]);
  api::check_extent(name, view, 1, out.shape[1]);
}

}  // namespace

void merge(std::span<const Partial> partials, const TensorView& out, const TensorView* lse,
           const float* sinks, Stream /*stream*/) {
  check_out("out", out);
  api::check_writable("out", out);
  kernels::cpu::MergeParams params;
  params.out = merge_tensor(out);
  params.num_tokens = out.shape[0];
  params.num_heads = static_cast<std::int32_t>(out.shape[1]);
  params.head_dim_v = static_cast<std::int32_t>(out.shape[2]);
  params.sinks = sinks;
  std::vector<kernels::cpu::MergePartial> checked;
  for (std::size_t i = 0; i < partials.size(); ++i) {
    const std::string name = fmt::format("partials[{}]", i);
    check_out((name + ".out").c_str(), partials[i].out);
    for (const std::int32_t axis : {0, 1, 2}) {
      api::check_extent((name + ".out").c_str(), partials[i].out, axis,
                        out.shape[static_cast<std::size_t>(axis)]);
    }
    check_lse((name + ".lse").c_str(), partials[i].lse, out);
    checked.push_back({merge_tensor(partials[i].out),
                       static_cast<const float*>(partials[i].lse.data), partials[i].lse.strides[0],
                       partials[i].lse.strides[1]});
  }
  if (lse != nullptr) {
    check_lse("lse", *lse, out);
    api::check_writable("lse", *lse);
    params.lse = static_cast<float*>(lse->data);
    params.lse_token_stride = lse->strides[0];
    params.lse_head_stride = lse->strides[1];
  }
  params.partials = checked.data();
  params.num_partials = static_cast<std::int32_t>(checked.size());
  dispatch::merge(params);
}

}  // namespace octavo
