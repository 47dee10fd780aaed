// SPDX-License-Identifier: Apache-2.0
// Memory of the host: zeroed, aligned, owned.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::device {

class HostBuffer {
 public:
  /// Of a cache line and of every vector register.
  static constexpr std::size_t kAlignment = 64;

  HostBuffer() = default;
  /// `num_bytes` zero bytes, taken from the system page by page as they are touched. Throws
  /// OutOfMemory, naming `what`.
  HostBuffer(std::size_t num_bytes, const char* what);
  ~HostBuffer();
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return num_bytes_; }

 private:
  void* block_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t num_bytes_ = 0;
};

}  // namespace octavo::device
