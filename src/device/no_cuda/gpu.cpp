// SPDX-License-Identifier: Apache-2.0
// The device interface of a build without the CUDA part: there is no GPU, and it says why. Buffers
// and events can't come to be, since require_gpu refuses first.
#include "device/gpu.h"

#include "base/error.h"

namespace octavo::device {
namespace {

[[noreturn]] void refuse(const char* argument) {
  throw Error(ErrorCode::NotCompiled,
              base::mismatch_text(argument, "cpu", "cuda", gpu_report().why_none));
}

}  // namespace

const GpuReport& gpu_report() {
  static const GpuReport kReport{
      .compiled = false,
      .why_none = "this build has no CUDA part: nvcc was not found or not asked"};
  return kReport;
}

const Gpu& require_gpu(Device /*device*/, const char* argument) { refuse(argument); }
void check(int /*code*/, const char* call) { refuse(call); }

DeviceGuard::DeviceGuard(Device device) {
  if (device.type == DeviceType::Cuda) refuse("device");
}
DeviceGuard::~DeviceGuard() { static_cast<void>(previous_); }  // the other build's field

GpuBuffer::GpuBuffer(Device /*device*/, std::size_t /*num_bytes*/, Fill /*fill*/,
                     const char* what) {
  refuse(what);
}
GpuBuffer::~GpuBuffer() { static_cast<void>(data_); }  // likewise
GpuBuffer::GpuBuffer(GpuBuffer&&) noexcept = default;
GpuBuffer& GpuBuffer::operator=(GpuBuffer&&) noexcept = default;

CapturedWork::CapturedWork(Device /*device*/, const std::function<void(Stream)>& /*enqueue*/) {
  refuse("device");
}
CapturedWork::~CapturedWork() { static_cast<void>(handle_); }  // the other build's field
CapturedWork::CapturedWork(CapturedWork&&) noexcept = default;
CapturedWork& CapturedWork::operator=(CapturedWork&&) noexcept = default;
void CapturedWork::launch(Stream /*stream*/) const { refuse("device"); }

Place place_of(const void* /*pointer*/) { return {}; }
Place known_place_of(const void* /*pointer*/) { return {}; }
bool is_captured(Stream /*stream*/) { return false; }
void check_stream(Device /*device*/, Stream /*stream*/) { refuse("device"); }

}  // namespace octavo::device
