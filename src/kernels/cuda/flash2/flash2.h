// SPDX-License-Identifier: Apache-2.0
// The backend `flash2`: attention over the cache as it lies, by mma.sync. Compiles without CUDA.
//
// A call enqueues the attention, and where they may be needed the padding, the cut into items, and
// the combination of split ones. None allocates or waits; lengths are read on the device alone, so
// that a call and a captured graph's replay under the same maxima give the same bits.
#pragma once

#include <octavo/types.h>

#include <cstddef>
#include <cstdint>

#include "device/gpu.h"
#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::flash2 {

/// The widest head of K, and of V; dims are multiples of kDimStep.
inline constexpr std::int32_t kWidestHead = 576;
inline constexpr std::int32_t kWidestHeadV = 512;
inline constexpr std::int32_t kDimStep = 8;

/// For one device; calls that may overlap need one each, as they do a workspace.
class Flash2 {
 public:
  /// Takes a little device memory, once. Its blocks take at most block_smem_bytes of shared memory,
  /// which the device allows. Throws DeviceFailure, OutOfMemory.
  Flash2(Device device, std::size_t block_smem_bytes);

  /// Bytes of workspace that a call within `lengths` takes.
  [[nodiscard]] std::size_t workspace_bytes(const AttendParams& params,
                                            const StepLengths& lengths) const;

  /// `workspace` is aligned to 256 bytes and holds workspace_bytes. Throws DeviceFailure.
  void attend(const AttendParams& params, const StepLengths& lengths, void* workspace,
              CUstream_st* stream) const;

 private:
  std::int32_t num_multiprocessors_;
  std::size_t block_smem_bytes_;
  device::GpuBuffer arrived_;  ///< 0 between calls.
};

/// What Flash2(device, block_smem_bytes) would say.
std::size_t workspace_bytes_on(Device device, std::size_t block_smem_bytes,
                               const AttendParams& params, const StepLengths& lengths);

}  // namespace octavo::kernels::flash2
