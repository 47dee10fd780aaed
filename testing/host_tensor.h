// SPDX-License-Identifier: Apache-2.0
// A dense tensor that owns its bytes, with guard zones around them: a write before or behind it
// shows.
#pragma once

#include <octavo/tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace octavo::testkit {

/// A dense, row-major tensor of the host's. Fresh elements are NaN (I32: -1): whoever forgets to
/// write one is found out, and whoever reads one too.
class HostTensor {
 public:
  HostTensor() = default;
  HostTensor(DType dtype, std::vector<std::int64_t> shape);

  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const { return shape_; }
  [[nodiscard]] std::int64_t size() const { return size_; }  ///< Elements.
  [[nodiscard]] std::int64_t num_bytes() const { return size_ * dtype_bytes(dtype_); }

  [[nodiscard]] double get(std::int64_t element_idx) const;
  void set(std::int64_t element_idx, double value);
  [[nodiscard]] std::byte* data() { return bytes_.data() + kGuardBytes; }
  [[nodiscard]] const std::byte* data() const { return bytes_.data() + kGuardBytes; }

  [[nodiscard]] TensorView view();
  [[nodiscard]] ConstTensorView view() const;

  /// All bytes, guards included.
  [[nodiscard]] std::span<std::byte> storage() { return bytes_; }
  [[nodiscard]] std::span<const std::byte> storage() const { return bytes_; }

  /// Whether the guard zones are as they were made.
  [[nodiscard]] bool guards_intact() const;

  /// Bitwise, guards left out.
  friend bool operator==(const HostTensor& a, const HostTensor& b);

 private:
  static constexpr std::int64_t kGuardBytes = 256;

  DType dtype_ = DType::F32;
  std::vector<std::int64_t> shape_;
  std::int64_t size_ = 0;
  std::vector<std::byte> bytes_ = std::vector<std::byte>(2 * kGuardBytes);
};

/// Writes NaN over elements of F32, F16 or BF16 storage, `count` elements from `first` on.
void poison(DType dtype, void* storage, std::int64_t first, std::int64_t count);

}  // namespace octavo::testkit
