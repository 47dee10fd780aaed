// SPDX-License-Identifier: Apache-2.0
#include "testing/host_tensor.h"

#include "testing/number.h"

#include <algorithm>
#include <cstring>

namespace octavo::testkit {

namespace {
// A quiet NaN in F32, F16 and BF16 alike, and no value that arithmetic makes by itself.
constexpr std::byte kCanary{0xFF};
}  // namespace

HostTensor::HostTensor(DType dtype, std::vector<std::int64_t> shape)
    : dtype_(dtype), shape_(std::move(shape)), size_(1) {
  for (const std::int64_t extent : shape_) size_ *= extent;
  bytes_.assign(static_cast<std::size_t>(num_bytes() + 2 * kGuardBytes), kCanary);
}

double HostTensor::get(std::int64_t element_idx) const {
  return load_number(dtype_, data() + element_idx * dtype_bytes(dtype_));
}

void HostTensor::set(std::int64_t element_idx, double value) {
  store_number(dtype_, value, data() + element_idx * dtype_bytes(dtype_));
}

TensorView HostTensor::view() {
  TensorView view(data(), dtype_, {});
  std::int64_t stride = 1;
  view.rank = static_cast<std::int32_t>(shape_.size());
  for (std::size_t axis = shape_.size(); axis-- > 0;) {
    view.shape[axis] = shape_[axis];
    view.strides[axis] = stride;
    stride *= shape_[axis];
  }
  return view;
}

ConstTensorView HostTensor::view() const {
  // The const is given back at once: a ConstTensorView can't be written through.
  return const_cast<HostTensor*>(this)->view();  // NOLINT(cppcoreguidelines-pro-type-const-cast)
}

bool HostTensor::guards_intact() const {
  const auto is_canary = [](std::byte byte) { return byte == kCanary; };
  return std::all_of(bytes_.begin(), bytes_.begin() + kGuardBytes, is_canary) &&
         std::all_of(bytes_.end() - kGuardBytes, bytes_.end(), is_canary);
}

bool operator==(const HostTensor& a, const HostTensor& b) {
  return a.dtype_ == b.dtype_ && a.shape_ == b.shape_ && a.bytes_ == b.bytes_;
}

void poison(DType dtype, void* storage, std::int64_t first, std::int64_t count) {
  const std::int64_t width = dtype_bytes(dtype);
  std::memset(static_cast<std::byte*>(storage) + first * width, std::to_integer<int>(kCanary),
              static_cast<std::size_t>(count * width));
}

}  // namespace octavo::testkit
