// SPDX-License-Identifier: Apache-2.0
// begin on the GPU: a plan's way through the ring of pinned buffers to the fixed addresses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "device/gpu.h"
#include "dispatch/cuda/copy_groups.h"
#include "dispatch/gpu.h"
#include "kernels/cuda/step/step.h"

namespace octavo::dispatch {

class Upload {
 public:
  Upload(const CacheConfig& config, std::int32_t max_pages_per_seq);
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  void begin(const detail::PlanData& plan, const GpuStorage& storage, Stream stream);
  [[nodiscard]] const kernels::cuda::ResidentStep& resident() const { return resident_; }

 private:
  static constexpr std::size_t kHalf = 8;  // buffers

  /// Half of the ring: free to be written when its event has passed. The event is recorded when the
  /// other half is entered: recording and asking are calls of the driver, too dear for every step.
  struct Half {
    std::array<device::PinnedBuffer, kHalf> buffers;
    device::Event used;
  };

  std::byte* next_buffer(Stream stream);
  void send_step(const detail::PlanData& plan, std::int32_t first_entry, std::int32_t num_entries,
                 std::byte* buffer, Stream stream);
  void send_copies(std::span<const PageCopy> copies, const GpuStorage& storage, std::byte* buffer,
                   Stream stream);

  CacheConfig config_;
  std::int32_t entries_per_upload_;
  std::int32_t copies_per_upload_;
  std::size_t copies_offset_ = 0;  // in a buffer, bytes
  CopyGroups groups_;
  std::array<Half, 2> ring_;
  std::size_t newest_ = 2 * kHalf - 1;  // of the ring's buffers
  // Behind the ring, so that it goes first: giving it back waits for the uploads under way.
  device::GpuBuffer arrays_;
  kernels::cuda::ResidentStep resident_;
};

}  // namespace octavo::dispatch
