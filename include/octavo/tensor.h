// SPDX-License-Identifier: Apache-2.0
// Tensors of the caller's, described: pointer, dtype, device, shape, strides. A view owns nothing.
#pragma once

#include <octavo/types.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace octavo {

inline constexpr std::int32_t kMaxRank = 6;

/// A tensor of somebody else's.
///
/// Units: shape in elements, strides in elements (any value, also 0 and negative ones where a
/// function says so). Thread safety: a plain value.
template <typename PointerT>
struct BasicTensorView {
  PointerT data = nullptr;
  DType dtype = DType::F32;
  Device device = {};
  std::int32_t rank = 0;
  std::array<std::int64_t, kMaxRank> shape = {};
  std::array<std::int64_t, kMaxRank> strides = {};

  constexpr BasicTensorView() = default;

  /// A dense, row-major tensor. Extents beyond kMaxRank are ignored.
  constexpr BasicTensorView(PointerT pointer, DType type,
                            std::initializer_list<std::int64_t> extents, Device place = {})
      : data(pointer), dtype(type), device(place) {
    for (const std::int64_t extent : extents) {
      if (rank < kMaxRank) shape[static_cast<std::size_t>(rank++)] = extent;
    }
    std::int64_t stride = 1;
    for (std::int32_t axis = rank - 1; axis >= 0; --axis) {
      strides[static_cast<std::size_t>(axis)] = stride;
      stride *= shape[static_cast<std::size_t>(axis)];
    }
  }

  /// A writable view is a readable one.
  template <typename OtherT>
  requires(
      !std::is_same_v<OtherT, PointerT> &&
      std::is_convertible_v<
          OtherT,
          PointerT>) constexpr BasicTensorView(const BasicTensorView<OtherT>&
                                                   other)  // NOLINT(google-explicit-constructor)
      : data(other.data),
        dtype(other.dtype),
        device(other.device),
        rank(other.rank),
        shape(other.shape),
        strides(other.strides) {}
};

using TensorView = BasicTensorView<void*>;
using ConstTensorView = BasicTensorView<const void*>;

}  // namespace octavo
