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

  /// Waits for the uploads that are under way.
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  void begin(const detail::PlanData& plan, const GpuStorage& storage, Stream stream);
  [[nodiscard]] const kernels::cuda::ResidentStep& resident() const { return resident_; }

 private:
  static constexpr std::size_t kRing = 8;

  /// A buffer of the ring: free to be written when its event has passed.
  struct Staging {
    device::PinnedBuffer memory;
    device::Event used;
  };

  Staging& next_staging();
  void send_step(const detail::PlanData& plan, std::int32_t first_entry, std::int32_t num_entries,
                 Staging& staging, Stream stream);
  void send_copies(std::span<const PageCopy> copies, const GpuStorage& storage, Staging& staging,
                   Stream stream);

  CacheConfig config_;
  std::int32_t entries_per_upload_;
  std::int32_t copies_per_upload_;
  std::size_t copies_offset_ = 0;  // in a staging buffer, bytes
  CopyGroups groups_;
  device::GpuBuffer arrays_;
  kernels::cuda::ResidentStep resident_;
  std::array<Staging, kRing> ring_;
  std::size_t newest_ = 0;
};

}  // namespace octavo::dispatch
