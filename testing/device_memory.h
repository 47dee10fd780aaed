// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU for tests and for the tool: plain CUDA calls, so that nothing of the library's
// own device room is trusted. In builds without CUDA there is none.
#pragma once

#include "testing/host_tensor.h"

#include <octavo/tensor.h>
#include <octavo/types.h>

#include <cstddef>
#include <string>

namespace octavo::testkit {

/// Why memory of a device can't be had; empty when it can.
std::string device_trouble(Device device);

/// Memory of a GPU, owned. Calls wait for the work of the whole device; a failing one throws
/// Error(DeviceFailure).
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Device device, std::size_t num_bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return num_bytes_; }
  void upload(const void* from, std::size_t num_bytes);
  void download(void* to, std::size_t num_bytes) const;

 private:
  Device device_;
  std::byte* data_ = nullptr;
  std::size_t num_bytes_ = 0;
};

/// Writes one byte over and over, also to memory that somebody else owns.
void fill_device(Device device, void* data, std::byte value, std::size_t num_bytes);
/// Reads memory that somebody else owns.
void read_device(Device device, void* to, const void* from, std::size_t num_bytes);
/// Waits for all work of a device.
void synchronize(Device device);

/// A host tensor's double on a device, guards included.
class DeviceTensor {
 public:
  DeviceTensor(Device device, const HostTensor& tensor);

  [[nodiscard]] TensorView view() const { return view_; }
  [[nodiscard]] const float* floats() const { return static_cast<const float*>(view_.data); }
  /// Brings the bytes back, guards included, to a tensor of the same shape.
  void download(HostTensor& to) const;

 private:
  DeviceMemory memory_;
  TensorView view_;
};

}  // namespace octavo::testkit
