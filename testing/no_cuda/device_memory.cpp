// SPDX-License-Identifier: Apache-2.0
#include "testing/device_memory.h"

#include <octavo/error.h>

namespace octavo::testkit {

namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::NotCompiled, device_trouble({DeviceType::Cuda, 0}));
}

}  // namespace

std::string device_trouble(Device device) {
  return device.type == DeviceType::Cpu ? "" : "this build has no CUDA part";
}

DeviceMemory::DeviceMemory(Device /*device*/, std::size_t /*num_bytes*/) { refuse(); }
DeviceMemory::~DeviceMemory() = default;
DeviceMemory::DeviceMemory(DeviceMemory&&) noexcept = default;
DeviceMemory& DeviceMemory::operator=(DeviceMemory&&) noexcept = default;
void DeviceMemory::upload(const void* /*from*/, std::size_t /*num_bytes*/) { refuse(); }
void DeviceMemory::download(void* /*to*/, std::size_t /*num_bytes*/) const { refuse(); }

void fill_device(Device /*device*/, void* /*data*/, std::byte /*value*/,
                 std::size_t /*num_bytes*/) {
  refuse();
}
void read_device(Device /*device*/, void* /*to*/, const void* /*from*/, std::size_t /*num_bytes*/) {
  refuse();
}
void synchronize(Device device) {
  if (device.type != DeviceType::Cpu) refuse();
}

}  // namespace octavo::testkit
