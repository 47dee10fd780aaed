// SPDX-License-Identifier: Apache-2.0
// The device interface over the CUDA runtime: finding GPUs, errors, the current device, pointers
// and streams.
#include "device/gpu.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "device/cuda/call.h"

namespace octavo::device {
namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

GpuReport look() {
  GpuReport report;
  report.compiled = true;
  int runtime = 0;
  int driver = 0;
  static_cast<void>(cudaRuntimeGetVersion(&runtime));
  static_cast<void>(cudaDriverGetVersion(&driver));
  report.versions =
      fmt::format("CUDA runtime {}, driver {}", version_text(runtime),
                  driver == 0 ? std::string("none") : "for CUDA " + version_text(driver));
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found == cudaErrorInsufficientDriver) {
    report.why_none =
        driver == 0 ? std::string("no NVIDIA driver is loaded")
                    : fmt::format("the driver is too old: wanted one for CUDA {}, got one for {}",
                                  version_text(runtime), version_text(driver));
  } else if (found != cudaSuccess) {
    report.why_none = fmt::format("cudaGetDeviceCount: {}", cudaGetErrorString(found));
  } else if (count == 0) {
    report.why_none = "the driver shows no GPU";
  }
  static_cast<void>(cudaGetLastError());
  if (!report.why_none.empty()) return report;
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties;
    const cudaError_t read = cudaGetDeviceProperties(&properties, index);
    if (read != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      report.gpus.clear();
      report.why_none =
          fmt::format("cudaGetDeviceProperties({}): {}", index, cudaGetErrorString(read));
      return report;
    }
    report.gpus.push_back({.name = properties.name,
                           .sm = properties.major * 10 + properties.minor,
                           .num_multiprocessors = properties.multiProcessorCount,
                           .block_smem_bytes = properties.sharedMemPerBlockOptin,
                           .memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem)});
  }
  return report;
}

}  // namespace

const GpuReport& gpu_report() {
  static const GpuReport report = look();
  return report;
}

const Gpu& require_gpu(Device device, const char* argument) {
  const GpuReport& report = gpu_report();
  if (report.gpus.empty()) {
    throw Error(ErrorCode::DeviceFailure,
                base::mismatch_text(argument, "a GPU", "none", report.why_none));
  }
  const auto count = static_cast<std::int32_t>(report.gpus.size());
  if (device.index < 0 || device.index >= count) {
    base::throw_mismatch(fmt::format("{}.index", argument), fmt::format("0 … {}", count - 1),
                         device.index);
  }
  return report.gpus[static_cast<std::size_t>(device.index)];
}

void check(int code, const char* call) {
  if (code == 0) return;
  const auto error = static_cast<cudaError_t>(code);
  static_cast<void>(cudaGetLastError());  // so that the next call does not report it again
  throw Error(ErrorCode::DeviceFailure,
              fmt::format("{}: {} ({})", call, cudaGetErrorString(error), cudaGetErrorName(error)));
}

DeviceGuard::DeviceGuard(Device device) {
  if (device.type != DeviceType::Cuda) return;
  int current = 0;
  OCTAVO_CUDA(cudaGetDevice(&current));
  if (current == device.index) return;
  OCTAVO_CUDA(cudaSetDevice(device.index));
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
}

Place place_of(const void* pointer) {
  cudaPointerAttributes attributes;
  OCTAVO_CUDA(cudaPointerGetAttributes(&attributes, pointer));
  switch (attributes.type) {
    case cudaMemoryTypeDevice:
      return {DeviceType::Cuda, attributes.device, false};
    case cudaMemoryTypeManaged:
      return {DeviceType::Cuda, attributes.device, true};
    default:
      return {DeviceType::Cpu, 0, false};
  }
}

bool is_captured(Stream stream) {
  if (stream.handle == nullptr) return false;  // the default stream can't be
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  OCTAVO_CUDA(cudaStreamIsCapturing(stream.handle, &capture));
  return capture != cudaStreamCaptureStatusNone;
}

void check_stream(Device device, Stream stream) {
  if (stream.handle == nullptr) return;  // the default stream of whichever device is current
  // A stream that is being captured may not be asked.
  if (is_captured(stream)) return;
  int index = 0;
  OCTAVO_CUDA(cudaStreamGetDevice(stream.handle, &index));
  if (index != device.index) {
    base::throw_mismatch("stream", fmt::format("one of cuda:{}", device.index),
                         fmt::format("one of cuda:{}", index));
  }
}

void read_back(void* to, const void* from, std::size_t num_bytes, Stream stream) {
  OCTAVO_CUDA(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToHost, stream.handle));
  OCTAVO_CUDA(cudaStreamSynchronize(stream.handle));
}

void sync_if_asked(Stream stream, const char* call) {
  static const bool asked = [] {
    const char* value = std::getenv("OCTAVO_SYNC");
    return value != nullptr && std::string_view(value) == "1";
  }();
  if (asked && !is_captured(stream))
    check(static_cast<int>(cudaStreamSynchronize(stream.handle)), call);
}

}  // namespace octavo::device
