// SPDX-License-Identifier: Apache-2.0
// Whether two views share an element, by intervals of bytes and by rows of equal pitch: so q, k, v
// and out may lie side by side in the rows of one buffer.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "api/tensors.h"
#include "base/error.h"

namespace octavo::api {
namespace {

struct Axis {
  std::int64_t stride;  // bytes, at least 0
  std::int64_t extent;
};

// A view as a set of bytes.
struct Bytes {
  explicit Bytes(const ConstTensorView& tensor) : element(dtype_bytes(tensor.dtype)) {
    first = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data));
    for (std::size_t i = 0; i < static_cast<std::size_t>(tensor.rank); ++i) {
      const std::int64_t stride = tensor.strides[i] * element;
      if (tensor.shape[i] == 0) empty = true;
      if (tensor.shape[i] <= 1) continue;
      if (stride < 0) first += stride * (tensor.shape[i] - 1);
      axes[num_axes++] = {std::abs(stride), tensor.shape[i]};
    }
  }

  // Bytes from the first to behind the last, of the axes that don't step by whole pitches.
  [[nodiscard]] std::int64_t span(std::int64_t pitch) const {
    std::int64_t result = element;
    for (const Axis& axis : std::span(axes.data(), num_axes)) {
      if (pitch == 0 || axis.stride % pitch != 0) result += axis.stride * (axis.extent - 1);
    }
    return result;
  }

  std::int64_t element;
  std::int64_t first = 0;
  bool empty = false;
  std::array<Axis, kMaxRank> axes = {};
  std::size_t num_axes = 0;
};

/// Whether b lies in the gaps that some axis of a leaves.
bool lies_between(const Bytes& a, const Bytes& b) {
  return std::any_of(a.axes.begin(), a.axes.begin() + static_cast<std::ptrdiff_t>(a.num_axes),
                     [&](const Axis& axis) {
                       const std::int64_t pitch = axis.stride;
                       if (pitch == 0) return false;
                       const std::int64_t from = ((b.first - a.first) % pitch + pitch) % pitch;
                       return a.span(pitch) <= from && from + b.span(pitch) <= pitch;
                     });
}

bool apart(const Bytes& a, const Bytes& b) {
  if (a.empty || b.empty) return true;
  if (a.first + a.span(0) <= b.first || b.first + b.span(0) <= a.first) return true;
  return lies_between(a, b) || lies_between(b, a);
}

}  // namespace

bool same_view(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (std::size_t i = 0; i < static_cast<std::size_t>(std::clamp(a.rank, 0, kMaxRank)); ++i) {
    if (a.shape[i] != b.shape[i] || (a.shape[i] > 1 && a.strides[i] != b.strides[i])) return false;
  }
  return true;
}

void check_apart(const char* name, const ConstTensorView& tensor, const char* other_name,
                 const ConstTensorView& other) {
  if (apart(Bytes(tensor), Bytes(other))) return;
  base::throw_mismatch(fmt::format("{}.data", name),
                       fmt::format("memory that {} does not use", other_name), "an overlap");
}

}  // namespace octavo::api
