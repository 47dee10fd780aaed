// SPDX-License-Identifier: Apache-2.0
#include <octavo/dlpack.h>
#include <octavo/version.h>

#include "base/error.h"

namespace octavo {

const char* version() noexcept {
#define OCTAVO_TEXT_OF(x) #x
#define OCTAVO_TEXT(x) OCTAVO_TEXT_OF(x)
  return OCTAVO_TEXT(OCTAVO_VERSION_MAJOR) "." OCTAVO_TEXT(OCTAVO_VERSION_MINOR) "." OCTAVO_TEXT(
      OCTAVO_VERSION_PATCH);
#undef OCTAVO_TEXT
#undef OCTAVO_TEXT_OF
}

namespace dlpack {
namespace {

// DLPack's codes.
constexpr std::int32_t kCpu = 1;
constexpr std::int32_t kCuda = 2;
constexpr std::int32_t kCudaHost = 3;
constexpr std::uint8_t kInt = 0;
constexpr std::uint8_t kFloat = 2;
constexpr std::uint8_t kBfloat = 4;

DType dtype_of(const DlDataType& type) {
  if (type.lanes != 1) base::throw_mismatch("dtype.lanes", 1, type.lanes);
  if (type.code == kFloat && type.bits == 32) return DType::F32;
  if (type.code == kFloat && type.bits == 16) return DType::F16;
  if (type.code == kBfloat && type.bits == 16) return DType::BF16;
  if (type.code == kInt && type.bits == 32) return DType::I32;
  if (type.code == kInt && type.bits == 8) return DType::I8;
  base::throw_mismatch("dtype", "float32, float16, bfloat16, int32 or int8",
                       fmt::format("code {} of {} bits", type.code, type.bits));
}

Device device_of(const DlDevice& device) {
  switch (device.device_type) {
    case kCpu:
    case kCudaHost:
      return {DeviceType::Cpu, 0};
    case kCuda:
      return {DeviceType::Cuda, device.device_id};
    default:
      base::throw_mismatch("device", "CPU (1), CUDA (2) or pinned memory (3)", device.device_type);
  }
}

}  // namespace

TensorView from_dlpack(const DlTensor& tensor) {
  if (tensor.ndim < 0 || tensor.ndim > kMaxRank) {
    base::throw_mismatch("ndim", fmt::format("0 … {}", kMaxRank), tensor.ndim);
  }
  TensorView view;
  view.dtype = dtype_of(tensor.dtype);
  view.device = device_of(tensor.device);
  if (tensor.data != nullptr) view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  view.rank = tensor.ndim;
  std::int64_t stride = 1;
  for (std::size_t axis = static_cast<std::size_t>(tensor.ndim); axis-- > 0;) {
    view.shape[axis] = tensor.shape[axis];
    view.strides[axis] = tensor.strides != nullptr ? tensor.strides[axis] : stride;
    stride *= tensor.shape[axis];
  }
  return view;
}

DlTensor to_dlpack(TensorView& view) {
  DlDataType type{kFloat, 32, 1};
  switch (view.dtype) {
    case DType::F32:
      break;
    case DType::F16:
      type = {kFloat, 16, 1};
      break;
    case DType::BF16:
      type = {kBfloat, 16, 1};
      break;
    case DType::I32:
      type = {kInt, 32, 1};
      break;
    case DType::I8:
      type = {kInt, 8, 1};
      break;
    case DType::F8E4M3:
      base::throw_mismatch("dtype", "one that DLPack has a code for", to_string(view.dtype));
  }
  const bool cuda = view.device.type == DeviceType::Cuda;
  return {.data = view.data,
          .device = {cuda ? kCuda : kCpu, view.device.index},
          .ndim = view.rank,
          .dtype = type,
          .shape = view.shape.data(),
          .strides = view.strides.data(),
          .byte_offset = 0};
}

}  // namespace dlpack
}  // namespace octavo
