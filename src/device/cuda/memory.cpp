// SPDX-License-Identifier: Apache-2.0
// The device interface over the CUDA runtime: memory and events.
#include <cuda_runtime_api.h>

#include <utility>

#include "base/error.h"
#include "device/cuda/call.h"
#include "device/gpu.h"

namespace octavo::device {

GpuBuffer::GpuBuffer(Device device, std::size_t num_bytes, Fill fill, const char* what)
    : device_(device), num_bytes_(num_bytes) {
  if (num_bytes == 0) return;
  const DeviceGuard guard(device);
  void* memory = nullptr;
  const cudaError_t made = cudaMalloc(&memory, num_bytes);
  if (made == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    OCTAVO_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    throw Error(ErrorCode::OutOfMemory,
                fmt::format("{}: wanted {} bytes of cuda:{}, got none of {} free (take a smaller "
                            "configuration)",
                            what, num_bytes, device.index, free_bytes));
  }
  check(static_cast<int>(made), "cudaMalloc");
  data_ = static_cast<std::byte*>(memory);
  if (fill == Fill::None) return;
  cudaError_t cleared = cudaMemset(memory, 0, num_bytes);
  // Streams that don't wait for the default stream must see the zeros too.
  if (cleared == cudaSuccess) cleared = cudaStreamSynchronize(nullptr);
  if (cleared != cudaSuccess) {
    static_cast<void>(cudaFree(memory));
    data_ = nullptr;
    check(static_cast<int>(cleared), "cudaMemset");
  }
}

GpuBuffer::~GpuBuffer() {
  // Waits for work that uses the memory; a failure has been or will be reported by another call.
  if (data_ != nullptr) static_cast<void>(cudaFree(data_));
}

GpuBuffer::GpuBuffer(GpuBuffer&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      num_bytes_(std::exchange(other.num_bytes_, 0)) {}

GpuBuffer& GpuBuffer::operator=(GpuBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

PinnedBuffer::PinnedBuffer(Device device, std::size_t num_bytes, const char* what)
    : num_bytes_(num_bytes) {
  if (num_bytes == 0) return;
  const DeviceGuard guard(device);
  void* memory = nullptr;
  const cudaError_t made =
      cudaHostAlloc(&memory, num_bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  if (made == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    throw Error(
        ErrorCode::OutOfMemory,
        fmt::format("{}: wanted {} bytes of pinned host memory, got none", what, num_bytes));
  }
  check(static_cast<int>(made), "cudaHostAlloc");
  data_ = static_cast<std::byte*>(memory);
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) static_cast<void>(cudaFreeHost(data_));
}

PinnedBuffer::PinnedBuffer(PinnedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

Event Event::make() {
  Event event;
  cudaEvent_t handle = nullptr;
  OCTAVO_CUDA(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming));
  event.handle_ = handle;
  return event;
}

Event::~Event() {
  if (handle_ != nullptr) static_cast<void>(cudaEventDestroy(static_cast<cudaEvent_t>(handle_)));
}

Event::Event(Event&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)),
      recorded_(std::exchange(other.recorded_, false)) {}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(recorded_, other.recorded_);
  return *this;
}

void Event::record(Stream stream) {
  OCTAVO_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(handle_), stream.handle));
  recorded_ = true;
}

void Event::wait() {
  if (!recorded_) return;
  auto* event = static_cast<cudaEvent_t>(handle_);
  if (cudaEventQuery(event) == cudaSuccess) return;  // cheaper than waiting, and the usual case
  static_cast<void>(cudaGetLastError());             // "not ready", or a failure that comes again
  OCTAVO_CUDA(cudaEventSynchronize(event));
}

}  // namespace octavo::device
