// SPDX-License-Identifier: Apache-2.0
// Buffers of K and of V that every warp fills its part of, for blocks that have a multiprocessor
// for themselves: no other block works while one waits, so that its warps should not wait for each
// other either. A buffer is full once the copies of all threads are there, and free once all warps
// have used it; K and V apart, so that a warp may be half a tile ahead of another, and one's
// products meet the other's exponentials.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/barrier.cuh"

namespace octavo::kernels::flash2 {

using cuda::SmemAddress;

enum class Filled : std::uint8_t { Keys, Values };

/// In shared memory. Goes on from item to item.
template <typename ConfigT, bool kExists = ConfigT::kDrifts>
struct alignas(16) Ring {
  static constexpr int kStages = ConfigT::kStages;

  std::uint64_t full[2][kStages];  ///< Of K, of V.
  std::uint64_t free[2][kStages];
  std::uint32_t used;  ///< Tiles of the items before.

  /// By one thread. All lanes tell that they have used a buffer: one for its warp is no faster, and
  /// tools take it for a race.
  __device__ void init() {
    for (int of = 0; of < 2; ++of) {
      for (int s = 0; s < kStages; ++s) {
        cuda::init_barrier(cuda::smem_address(&full[of][s]), ConfigT::kThreads);
        cuda::init_barrier(cuda::smem_address(&free[of][s]), ConfigT::kThreads);
      }
    }
    used = 0;
  }
};
template <typename ConfigT>
struct Ring<ConfigT, false> {};

/// A warp's place in a ring: the buffers of a tile, and those that it fills meanwhile, of the tile
/// kStages - 1 later. By all lanes.
template <typename ConfigT>
class RingPlace {
 public:
  /// kStages - 1 tiles in front of an item's first.
  explicit __device__ RingPlace(const Ring<ConfigT>& ring)
      : barriers_(cuda::smem_address(&ring)), at_(ring.used - kAhead) {}

  [[nodiscard]] __device__ int stage() const { return stage_of(at_); }
  /// Of what is filled.
  [[nodiscard]] __device__ int next_stage() const { return stage_of(at_ + kAhead); }
  __device__ void advance() { ++at_; }
  /// By one thread, behind an item's last tile.
  __device__ void keep(Ring<ConfigT>& ring) const { ring.used = at_; }

  __device__ void wait_full(Filled of) const {
    cuda::wait_barrier(full(of, at_), at_ / kStages % 2);
  }
  __device__ void release(Filled of) const { cuda::arrive(free(of, at_)); }
  __device__ void wait_free(Filled of) const {
    cuda::wait_barrier(free(of, at_ + kAhead), (at_ + kAhead) / kStages % 2 ^ 1U);
  }
  /// All copies for the buffer are asked for.
  __device__ void fill(Filled of) const { cuda::arrive_behind_copies(full(of, at_ + kAhead)); }

 private:
  static constexpr unsigned kStages = ConfigT::kStages;
  static constexpr unsigned kAhead = kStages - 1;
  static_assert((kStages & kAhead) == 0, "counts of tiles wrap");

  [[nodiscard]] static __device__ int stage_of(std::uint32_t tile) {
    return static_cast<int>(tile % kStages);
  }
  [[nodiscard]] __device__ SmemAddress full(Filled of, std::uint32_t tile) const {
    return barriers_ + (static_cast<unsigned>(of) * kStages + tile % kStages) * 8;
  }
  [[nodiscard]] __device__ SmemAddress free(Filled of, std::uint32_t tile) const {
    return full(of, tile) + 2 * kStages * 8;
  }

  SmemAddress barriers_;
  std::uint32_t at_;  ///< Tiles before, of all items.
};

}  // namespace octavo::kernels::flash2
