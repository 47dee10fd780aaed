// SPDX-License-Identifier: Apache-2.0
#include "layer.h"

#include <fmt/format.h>

#include "errors.h"
#include "names.h"

namespace octavo::python {
namespace {

/// A table of angles: float32 [positions, rotary_dim / 2], dense.
Memory table_memory(std::string_view name, nb::handle object) {
  Memory memory = read_memory(name, object);
  if (memory.kind != Kind::Float || memory.bytes != 4)
    throw_mismatch(fmt::format("{}.dtype", name), "float32", kind_text(memory));
  // No memory would mean that there are no tables, and no width the whole head.
  if (memory.rank != 2 || memory.shape[0] == 0 || memory.shape[1] == 0)
    throw_mismatch(fmt::format("{}.shape", name), "[positions, rotary_dim / 2], both at least 1",
                   shape_text(memory));
  const bool dense = (memory.shape[1] <= 1 || memory.strides[1] == 1) &&
                     (memory.shape[0] <= 1 || memory.strides[0] == memory.shape[1]);
  if (!dense) throw_mismatch(fmt::format("{}.strides", name), "a dense array", "gaps");
  return memory;
}

}  // namespace

RopeHolder::RopeHolder(nb::handle style, std::int32_t rotary_dim, double base, nb::handle cos,
                       nb::handle sin) {
  rope_.style = rope_style_named("style", style);
  rope_.rotary_dim = rotary_dim;
  rope_.base = base;
  if (cos.is_none() != sin.is_none())
    throw_mismatch(cos.is_none() ? "cos" : "sin", "both tables or neither", "None");
  if (cos.is_none()) return;
  const Memory cosines = table_memory("cos", cos);
  const Memory sines = table_memory("sin", sin);
  if (cosines.shape != sines.shape)
    throw_mismatch("sin.shape", shape_text(cosines) + " (cos's)", shape_text(sines));
  if (cosines.device != sines.device)
    throw_mismatch("sin.device", device_text(cosines.device), device_text(sines.device));
  const std::int64_t width = 2 * cosines.shape[1];
  if (rotary_dim == 0) rope_.rotary_dim = static_cast<std::int32_t>(width);
  if (rope_.rotary_dim != width) {
    throw_mismatch("cos.shape", fmt::format("[positions, {}]", rotary_dim / 2),
                   shape_text(cosines));
  }
  kept_tables_ = nb::make_tuple(cos, sin, cosines.keeper_or_none(), sines.keeper_or_none());
  device_ = cosines.device;
  rope_.cos = static_cast<const float*>(cosines.data);
  rope_.sin = static_cast<const float*>(sines.data);
  rope_.num_table_positions = cosines.shape[0];
}

void RopeHolder::check_device(Device device) const {
  if (rope_.cos != nullptr && device_ != device)
    throw_mismatch("rope.cos.device", device_text(device), device_text(device_));
}

AttentionConfig config_of(const ConfigWords& words) {
  AttentionConfig config;
  if (!words.softmax_scale.is_none()) {
    const auto scale = static_cast<float>(nb::cast<double>(nb::float_(words.softmax_scale)));
    if (scale == 0.0F)
      throw_mismatch("softmax_scale", "another number than 0", "0", "None: 1 / sqrt(head_dim)");
    config.softmax_scale = scale;
  }
  config.mask = mask_named("mask", words.mask);
  config.window = {words.window.first, words.window.second};
  config.softcap = static_cast<float>(words.softcap);
  config.batch_invariant = words.batch_invariant;
  config.backend = backend_named("backend", words.backend);
  config.compute = compute_named("compute", words.compute);
  config.num_threads = words.num_threads;
  return config;
}

LayerExtras::LayerExtras(nb::handle sinks, nb::handle alibi_slopes, const RopeHolder* rope,
                         nb::handle positions, std::int64_t num_q_heads, std::int64_t num_tokens,
                         Device device)
    : positions_("positions", positions, device) {
  if (num_q_heads > 0) {
    sinks_ = floats("sinks", sinks, num_q_heads, device);
    alibi_slopes_ = floats("alibi_slopes", alibi_slopes, num_q_heads, device);
  }
  positions_.require("positions", num_tokens);
  if (rope == nullptr) return;
  rope->check_device(device);
  rope_ = &rope->rope();
}

void LayerExtras::set(LayerInputs& inputs) const {
  inputs.sinks = sinks_;
  inputs.alibi_slopes = alibi_slopes_;
  inputs.rope = rope_;
  inputs.positions = positions_.data();
}

std::optional<StepMaxima> maxima_of(nb::handle object) {
  if (object.is_none()) return std::nullopt;
  if (PyTuple_Check(object.ptr()) == 0 || PyTuple_Size(object.ptr()) != 4)
    throw_mismatch("maxima", "a StepMaxima", type_text(object));
  const auto number = [&](const char* name, Py_ssize_t i) {
    const std::int64_t value = whole_number(name, PyTuple_GetItem(object.ptr(), i));
    constexpr std::int64_t kMost = 0x7FFFFFFF;
    if (value < 0 || value > kMost)
      throw_mismatch(name, fmt::format("0 … {}", kMost), fmt::to_string(value));
    return static_cast<std::int32_t>(value);
  };
  return StepMaxima{number("maxima.num_seqs", 0), number("maxima.num_tokens", 1),
                    number("maxima.max_new_tokens", 2), number("maxima.max_kv_len", 3)};
}

void check_token_rank(std::string_view name, const Array& array, TensorFormat format) {
  const std::int32_t wanted = format == TensorFormat::Thd ? 3 : 4;
  if (array.view().rank != wanted) {
    throw_mismatch(fmt::format("{}.rank", name), fmt::format("{} ({})", wanted, to_string(format)),
                   fmt::to_string(array.view().rank));
  }
}

OutShape::OutShape(const Array& q, std::int64_t head_dim_v)
    : rank(static_cast<std::size_t>(q.view().rank)) {
  for (std::size_t axis = 0; axis < rank; ++axis) shape[axis] = q.view().shape[axis];
  shape[rank - 1] = head_dim_v;
}

}  // namespace octavo::python
