// SPDX-License-Identifier: Apache-2.0
// Zeroed memory of whichever device.
#pragma once

#include <octavo/types.h>

#include <cstddef>

#include "device/gpu.h"
#include "device/host_buffer.h"

namespace octavo::device {

class Buffer {
 public:
  Buffer() = default;
  /// Throws OutOfMemory, naming `what`.
  Buffer(Device device, std::size_t num_bytes, const char* what) {
    if (device.type == DeviceType::Cpu) {
      host_ = HostBuffer(num_bytes, what);
    } else {
      gpu_ = GpuBuffer(device, num_bytes, GpuBuffer::Fill::Zero, what);
    }
  }

  [[nodiscard]] std::byte* data() const {
    return host_.data() != nullptr ? host_.data() : gpu_.data();
  }
  [[nodiscard]] std::size_t size() const { return host_.size() + gpu_.size(); }

 private:
  HostBuffer host_;
  GpuBuffer gpu_;
};

}  // namespace octavo::device
