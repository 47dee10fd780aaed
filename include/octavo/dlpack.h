// SPDX-License-Identifier: Apache-2.0
// Exchange of tensors by DLPack, unmanaged: no ownership passes. The structs mirror DLPack's C
// layout (version 0.6 and later share it), so that this header needs none of DLPack's; a pointer to
// a `DLTensor` may be cast to them.
#pragma once

#include <octavo/export.h>
#include <octavo/tensor.h>

#include <cstdint>

namespace octavo::dlpack {

struct DlDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};

struct DlDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t ndim;
  DlDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  ///< In elements; null is dense row-major.
  std::uint64_t byte_offset;
};

/// The view of a DLPack tensor.
///
/// Dtypes: float32, float16, bfloat16, int32, int8; CPU, CUDA, pinned (read as CPU) devices.
/// Errors: InvalidArgument for other dtypes, lanes, devices, or a rank above kMaxRank.
OCTAVO_EXPORT TensorView from_dlpack(const DlTensor& tensor);

/// A DLPack tensor over a view. `shape` and `strides` of the result point into `view`, which must
/// outlive it.
///
/// Errors: InvalidArgument for F8E4M3, which DLPack 0.6 has no code for.
OCTAVO_EXPORT DlTensor to_dlpack(TensorView& view);

}  // namespace octavo::dlpack
