// SPDX-License-Identifier: Apache-2.0
#include "testing/device_memory.h"

#include <octavo/error.h>

#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include <utility>

namespace octavo::testkit {

namespace {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorCode::DeviceFailure, fmt::format("{}: {}", call, cudaGetErrorString(error)));
}

void select(Device device) { check(cudaSetDevice(device.index), "cudaSetDevice"); }

}  // namespace

std::string device_trouble(Device device) {
  if (device.type == DeviceType::Cpu) return {};
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return cudaGetErrorString(error);
  }
  if (device.index >= count) return fmt::format("wanted GPU {}, got {} GPUs", device.index, count);
  return {};
}

DeviceMemory::DeviceMemory(Device device, std::size_t num_bytes)
    : device_(device), num_bytes_(num_bytes) {
  if (num_bytes == 0) return;
  select(device);
  void* memory = nullptr;
  check(cudaMalloc(&memory, num_bytes), "cudaMalloc");
  data_ = static_cast<std::byte*>(memory);
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) static_cast<void>(cudaFree(data_));
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      num_bytes_(std::exchange(other.num_bytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

void DeviceMemory::upload(const void* from, std::size_t num_bytes) {
  select(device_);
  synchronize(device_);
  check(cudaMemcpy(data_, from, num_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  synchronize(device_);
}

void DeviceMemory::download(void* to, std::size_t num_bytes) const {
  read_device(device_, to, data_, num_bytes);
}

void fill_device(Device device, void* data, std::byte value, std::size_t num_bytes) {
  select(device);
  check(cudaMemset(data, std::to_integer<int>(value), num_bytes), "cudaMemset");
}

void read_device(Device device, void* to, const void* from, std::size_t num_bytes) {
  synchronize(device);
  check(cudaMemcpy(to, from, num_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

void synchronize(Device device) {
  select(device);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

}  // namespace octavo::testkit
