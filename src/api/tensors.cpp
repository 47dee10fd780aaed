// SPDX-License-Identifier: Apache-2.0
#include "api/tensors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "base/error.h"
#include "device/gpu.h"

namespace octavo::api {
namespace {

std::string shape_text(const ConstTensorView& tensor) {
  const auto rank = static_cast<std::size_t>(std::clamp(tensor.rank, 0, kMaxRank));
  return fmt::format("[{}]",
                     fmt::join(tensor.shape.begin(),
                               tensor.shape.begin() + static_cast<std::ptrdiff_t>(rank), ", "));
}

std::string device_text(Device device) {
  if (device.type == DeviceType::Cpu) return "cpu";
  return fmt::format("{}:{}", to_string(device.type), device.index);
}

bool is_empty(const ConstTensorView& tensor) {
  const auto end = tensor.shape.begin() + tensor.rank;
  return std::find(tensor.shape.begin(), end, 0) != end;
}

[[noreturn]] void throw_shape(const char* name, const std::string& wanted,
                              const ConstTensorView& tensor) {
  base::throw_mismatch(fmt::format("{}.shape", name), wanted, shape_text(tensor));
}

}  // namespace

void check_pointer(const char* name, const void* pointer, std::int64_t count, Device device,
                   const char* member) {
  if (pointer == nullptr || count == 0) return;
  const bool on_host = device.type == DeviceType::Cpu;
  const device::Place place = on_host ? device::known_place_of(pointer) : device::place_of(pointer);
  if (place.managed) return;
  if (place.type == device.type && (on_host || place.index == device.index)) return;
  const auto memory_of = [](Device where) {
    return "memory of " +
           (where.type == DeviceType::Cpu ? std::string("the host") : device_text(where));
  };
  base::throw_mismatch(fmt::format("{}{}", name, member), memory_of(device),
                       memory_of({place.type, place.index}));
}

void check_tensor(const char* name, const ConstTensorView& tensor, std::int32_t rank,
                  Device device) {
  if (tensor.device != device) {
    base::throw_mismatch(fmt::format("{}.device", name), device_text(device),
                         device_text(tensor.device));
  }
  if (tensor.rank != rank) base::throw_mismatch(fmt::format("{}.rank", name), rank, tensor.rank);
  for (std::int32_t axis = 0; axis < rank; ++axis) {
    if (tensor.shape[static_cast<std::size_t>(axis)] < 0)
      throw_shape(name, "extents of at least 0", tensor);
  }
  if (tensor.data == nullptr && !is_empty(tensor)) {
    base::throw_mismatch(fmt::format("{}.data", name), "a pointer", "null");
  }
  const auto element = static_cast<std::uintptr_t>(dtype_bytes(tensor.dtype));
  const std::uintptr_t beyond = reinterpret_cast<std::uintptr_t>(tensor.data) % element;
  if (beyond != 0) {
    base::throw_mismatch(fmt::format("{}.data", name),
                         fmt::format("a multiple of {} bytes", element),
                         fmt::format("{} beyond one", beyond));
  }
  if (!is_empty(tensor)) check_pointer(name, tensor.data, 1, device, ".data");
}

void check_extent(const char* name, const ConstTensorView& tensor, std::int32_t axis,
                  std::int64_t wanted) {
  if (tensor.shape[static_cast<std::size_t>(axis)] == wanted) return;
  throw_shape(name, fmt::format("{} at axis {}", wanted, axis), tensor);
}

/// Axes sorted by stride must each step over all that the smaller ones span: enough to rule out
/// shared elements, and true of every layout in use.
void check_writable(const char* name, const ConstTensorView& tensor) {
  if (is_empty(tensor)) return;
  std::array<std::pair<std::int64_t, std::int64_t>, kMaxRank> axes;  // stride, extent; ascending
  std::size_t num_axes = 0;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(tensor.rank); ++axis) {
    if (tensor.shape[axis] <= 1) continue;
    const std::pair<std::int64_t, std::int64_t> next{std::abs(tensor.strides[axis]),
                                                     tensor.shape[axis]};
    std::size_t place = num_axes++;
    for (; place > 0 && next < axes[place - 1]; --place) axes[place] = axes[place - 1];
    axes[place] = next;
  }
  std::int64_t span = 1;
  for (std::size_t i = 0; i < num_axes; ++i) {
    const auto [stride, extent] = axes[i];
    if (stride < span) {
      base::throw_mismatch(fmt::format("{}.strides", name),
                           fmt::format("at least {} for the axis of extent {}", span, extent),
                           stride, "elements must not overlap");
    }
    span += stride * (extent - 1);
  }
}

kernels::TokenLayout token_layout(const char* name, const ConstTensorView& tensor,
                                  const StepShape& step, std::int32_t num_heads, std::int32_t dim,
                                  bool writable) {
  const bool ragged = step.format == TensorFormat::Thd;
  check_tensor(name, tensor, ragged ? 3 : 4, step.device);
  if (tensor.dtype != DType::F32 && tensor.dtype != DType::F16 && tensor.dtype != DType::BF16) {
    base::throw_mismatch(fmt::format("{}.dtype", name), "f32, f16 or bf16",
                         to_string(tensor.dtype));
  }
  const auto& shape = tensor.shape;
  const auto& strides = tensor.strides;
  const std::size_t token_axis = step.format == TensorFormat::Bshd ? 1 : 0;
  const std::size_t batch_axis = 1 - token_axis;
  const std::size_t head_axis = ragged ? 1 : 2;
  const bool fits =
      ragged ? shape[0] >= step.num_tokens
             : shape[batch_axis] >= step.num_seqs && shape[token_axis] >= step.max_new_tokens;
  if (!fits || shape[head_axis] != num_heads || shape[head_axis + 1] != dim) {
    std::string wanted;
    if (ragged) {
      wanted = fmt::format("[>= {}, {}, {}] (thd)", step.num_tokens, num_heads, dim);
    } else if (token_axis == 1) {
      wanted = fmt::format("[>= {}, >= {}, {}, {}] (bshd)", step.num_seqs, step.max_new_tokens,
                           num_heads, dim);
    } else {
      wanted = fmt::format("[>= {}, >= {}, {}, {}] (sbhd)", step.max_new_tokens, step.num_seqs,
                           num_heads, dim);
    }
    throw_shape(name, wanted, tensor);
  }
  if (writable) check_writable(name, tensor);
  kernels::TokenLayout layout;
  layout.ragged = ragged;
  layout.batch_stride = ragged ? 0 : strides[batch_axis];
  layout.token_stride = strides[token_axis];
  if (ragged) layout.token_stride = strides[0];
  layout.head_stride = strides[head_axis];
  layout.dim_stride = strides[head_axis + 1];
  layout.num_batch_rows = ragged ? 0 : static_cast<std::int32_t>(shape[batch_axis]);
  layout.num_token_rows = ragged ? shape[0] : shape[token_axis];
  return layout;
}

void set_lse(const TensorView* lse, Device device, kernels::AttendParams& params) {
  if (lse == nullptr) return;
  check_tensor("lse", *lse, 2, device);
  if (lse->dtype != DType::F32) base::throw_mismatch("lse.dtype", "f32", to_string(lse->dtype));
  if (lse->shape[0] < params.batch.num_tokens || lse->shape[1] != params.num_q_heads) {
    throw_shape("lse", fmt::format("[>= {}, {}]", params.batch.num_tokens, params.num_q_heads),
                *lse);
  }
  check_writable("lse", *lse);
  params.lse = static_cast<float*>(lse->data);
  params.lse_token_stride = lse->strides[0];
  params.lse_head_stride = lse->strides[1];
  params.num_lse_rows = lse->shape[0];
}

kernels::RopeParams rope_params(const LayerInputs& inputs, std::int32_t head_dim,
                                const kernels::StepBatch& host, const StepShape& shape) {
  kernels::RopeParams params;
  if (inputs.rope == nullptr) return params;
  const Rope& rope = *inputs.rope;
  params.style = rope.style;
  params.rotary_dim = rope.rotary_dim == 0 ? head_dim : rope.rotary_dim;
  params.base = rope.base;
  params.cos = rope.cos;
  params.sin = rope.sin;
  params.num_table_positions = rope.num_table_positions;
  params.positions = inputs.positions;
  if (params.rotary_dim < 2 || params.rotary_dim > head_dim || params.rotary_dim % 2 != 0) {
    base::throw_mismatch("rope.rotary_dim",
                         fmt::format("an even number up to head_dim ({})", head_dim),
                         params.rotary_dim);
  }
  if (!(rope.base > 0.0) || !std::isfinite(rope.base)) {
    base::throw_mismatch("rope.base", "a positive finite number", rope.base);
  }
  if ((rope.cos == nullptr) != (rope.sin == nullptr)) {
    base::throw_mismatch("rope", "cos and sin or neither",
                         rope.cos == nullptr ? "sin alone" : "cos alone");
  }
  const bool tables = rope.cos != nullptr;
  const auto check = [&](std::int64_t position) {
    if (position >= 0 && (!tables || position < rope.num_table_positions)) return;
    const std::string wanted =
        tables ? fmt::format("0 … {} (rope.num_table_positions)", rope.num_table_positions - 1)
               : std::string("at least 0");
    base::throw_mismatch("position of a new token", wanted, position);
  };
  check_pointer("rope.cos", rope.cos, rope.num_table_positions, shape.device);
  check_pointer("rope.sin", rope.sin, rope.num_table_positions, shape.device);
  check_pointer("positions", inputs.positions, shape.num_tokens, shape.device);
  if (inputs.positions != nullptr) {
    if (shape.device.type == DeviceType::Cuda) return params;
    for (std::int32_t i = 0; i < host.num_tokens; ++i) check(inputs.positions[i]);
    return params;
  }
  if (shape.bounded) {
    if (tables && rope.num_table_positions < shape.max_kv_len) {
      base::throw_mismatch("rope.num_table_positions",
                           fmt::format("at least {} (the most keys of a step)", shape.max_kv_len),
                           rope.num_table_positions);
    }
    return params;
  }
  for (std::int32_t b = 0; b < host.num_seqs; ++b) {
    const std::int32_t new_tokens = host.token_offsets[b + 1] - host.token_offsets[b];
    if (new_tokens == 0) continue;
    check(host.kv_lens[b] - new_tokens);
    check(host.kv_lens[b] - 1);
  }
  return params;
}

}  // namespace octavo::api
