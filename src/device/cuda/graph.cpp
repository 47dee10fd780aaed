// SPDX-License-Identifier: Apache-2.0
// The device interface over the CUDA runtime: captured work.
#include <cuda_runtime_api.h>

#include <utility>

#include "device/cuda/call.h"
#include "device/gpu.h"

namespace octavo::device {
namespace {

/// A stream of its own to capture on; the caller's may be busy, or be the default stream.
class CaptureStream {
 public:
  CaptureStream() { OCTAVO_CUDA(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
  ~CaptureStream() { static_cast<void>(cudaStreamDestroy(handle_)); }
  CaptureStream(const CaptureStream&) = delete;
  CaptureStream& operator=(const CaptureStream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

class Template {
 public:
  explicit Template(cudaGraph_t graph) : graph_(graph) {}
  ~Template() {
    if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
  }
  Template(const Template&) = delete;
  Template& operator=(const Template&) = delete;
  [[nodiscard]] cudaGraph_t get() const { return graph_; }

 private:
  cudaGraph_t graph_;
};

}  // namespace

CapturedWork::CapturedWork(Device device, const std::function<void(Stream)>& enqueue) {
  const DeviceGuard guard(device);
  const CaptureStream stream;
  // Relaxed: a library that loads its kernels at their first use may do so.
  OCTAVO_CUDA(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeRelaxed));
  cudaGraph_t captured = nullptr;
  try {
    enqueue({stream.get()});
  } catch (...) {
    static_cast<void>(cudaStreamEndCapture(stream.get(), &captured));
    static_cast<void>(cudaGetLastError());
    const Template dropped(captured);
    throw;
  }
  const cudaError_t ended = cudaStreamEndCapture(stream.get(), &captured);
  const Template graph(captured);
  check(static_cast<int>(ended), "cudaStreamEndCapture");
  cudaGraphExec_t exec = nullptr;
  OCTAVO_CUDA(cudaGraphInstantiate(&exec, graph.get(), 0));
  handle_ = exec;
}

CapturedWork::~CapturedWork() {
  if (handle_ != nullptr)
    static_cast<void>(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(handle_)));
}

CapturedWork::CapturedWork(CapturedWork&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)) {}

CapturedWork& CapturedWork::operator=(CapturedWork&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

void CapturedWork::launch(Stream stream) const {
  OCTAVO_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(handle_), stream.handle));
}

}  // namespace octavo::device
