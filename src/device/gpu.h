// SPDX-License-Identifier: Apache-2.0
// GPUs behind one host-only interface: which there are, their memory, pinned memory of the host,
// events, order on streams. Implemented in cuda/ and, for builds without nvcc, in no_cuda/, where
// every call refuses. A failing CUDA call throws DeviceFailure with the call's name; memory that
// cannot be had throws OutOfMemory. Nothing here knows what the bytes mean.
#pragma once

#include <octavo/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace octavo::device {

struct Gpu {
  std::string name;
  std::int32_t sm = 0;  ///< Compute capability, major * 10 + minor.
  std::int32_t num_multiprocessors = 0;
  std::size_t block_smem_bytes = 0;  ///< Shared memory that a block may have when it asks.
  std::int64_t memory_bytes = 0;
};

/// What was found when first asked.
struct GpuReport {
  bool compiled = false;  ///< This build has the CUDA part.
  std::vector<Gpu> gpus;
  std::string why_none;  ///< Empty when there is a GPU.
  std::string versions;  ///< Of the CUDA runtime and the driver; empty without the CUDA part.
};

/// Looks once, then remembers. A missing GPU, driver or CUDA part is what it reports.
const GpuReport& gpu_report();

/// The GPU of a device. Throws NotCompiled (no CUDA part), DeviceFailure (no GPU, driver too old),
/// InvalidArgument (no GPU of this index).
const Gpu& require_gpu(Device device, const char* argument);

/// Throws DeviceFailure, with `call` and CUDA's words, unless `code` (a cudaError_t) is success.
void check(int code, const char* call);

/// Makes a GPU current for the calls of a scope. Does nothing for the CPU.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

/// Memory of a GPU, owned.
class GpuBuffer {
 public:
  enum class Fill : std::uint8_t { Zero, None };

  GpuBuffer() = default;
  /// Zeroed bytes are there for every stream when it returns.
  GpuBuffer(Device device, std::size_t num_bytes, Fill fill, const char* what);
  ~GpuBuffer();
  GpuBuffer(GpuBuffer&& other) noexcept;
  GpuBuffer& operator=(GpuBuffer&& other) noexcept;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return num_bytes_; }

 private:
  Device device_;
  std::byte* data_ = nullptr;
  std::size_t num_bytes_ = 0;
};

/// Page-locked memory of the host, which kernels can read at the same address.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(Device device, std::size_t num_bytes, const char* what);
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return num_bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t num_bytes_ = 0;
};

/// A point in a stream's work that the host can wait for.
class Event {
 public:
  Event() = default;
  /// Of the device that is current.
  static Event make();
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;

  void record(Stream stream);
  /// Returns at once when the event was never recorded.
  void wait();

 private:
  void* handle_ = nullptr;
  bool recorded_ = false;
};

/// Work that is captured once and then enqueued as a whole.
class CapturedWork {
 public:
  CapturedWork() = default;
  /// What `enqueue` puts on the stream that it is given. Nothing of it runs yet.
  CapturedWork(Device device, const std::function<void(Stream)>& enqueue);
  ~CapturedWork();
  CapturedWork(CapturedWork&& other) noexcept;
  CapturedWork& operator=(CapturedWork&& other) noexcept;

  void launch(Stream stream) const;

 private:
  void* handle_ = nullptr;
};

/// Where a pointer's memory is. Memory that the driver does not know is the host's.
struct Place {
  DeviceType type = DeviceType::Cpu;
  std::int32_t index = 0;
  bool managed = false;  ///< Moves between devices by itself.
};
Place place_of(const void* pointer);

/// The same without starting CUDA where the process has not: for pointers that are to be the
/// host's.
Place known_place_of(const void* pointer);

/// Whether work on the stream goes into a CUDA graph.
bool is_captured(Stream stream);

/// Throws InvalidArgument when the stream is another device's, unless it is being captured.
void check_stream(Device device, Stream stream);

/// Copies memory of a GPU to the host; waits for the stream.
void read_back(void* to, const void* from, std::size_t num_bytes, Stream stream);

/// With OCTAVO_SYNC=1 in the environment, waits for the stream, so that a failure shows at the call
/// that caused it. Otherwise, and while the stream is captured, nothing.
void sync_if_asked(Stream stream, const char* call);

}  // namespace octavo::device
