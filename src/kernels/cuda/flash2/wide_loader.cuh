// SPDX-License-Identifier: Apache-2.0
// How tiles of K and V come to shared memory where a row has more chunks than a warp has lanes.
// tile.cuh has the loader of narrower heads.
#pragma once

#include <cstdint>

#include "kernels/cuda/flash2/tile.cuh"

namespace octavo::kernels::flash2 {

/// Rows of V, as place_of and multiply_values want to know them.
template <typename ConfigT>
struct ValueRows {
  static constexpr int kRowBytes = ConfigT::kDimV * 2;
};

/// A warp brings kWarpKeys rows of each tile. A lane looks up one of them and tells the others
/// where it lies, so that it doesn't matter which rows share a page.
template <typename ConfigT>
class WideLoader {
 public:
  __device__ WideLoader(const Work& w, const Item& item) : w_(w), item_(item) {}

  /// Looks up the rows of a tile for load_keys and load_values; what is found is not waited for
  /// before these. Keys that none of the tokens sees, and pages outside the pool, read as zeros:
  /// what lies there never spreads.
  __device__ void look_up(int tile) {
    key_ = tile * ConfigT::kKeys + first_row() + lane() % ConfigT::kWarpKeys;
    page_ = kNowhere;
    if (tile >= item_.keys.end_tile || key_ < item_.keys.begin_key || key_ >= item_.keys.end_key)
      return;
    page_ = item_.row;
    if (w_.attend.batch.page_table != nullptr)
      page_ = item_.pages[divide(static_cast<std::uint32_t>(key_), w_.by_page)];
  }

  __device__ void load_keys(SmemAddress to) const {
    load<ConfigT, ConfigT::kDim>(item_.k_head, w_.attend.kv.k, w_.attend.head_dim, to);
  }
  __device__ void load_values(SmemAddress to) const {
    load<ValueRows<ConfigT>, ConfigT::kDimV>(item_.v_head, w_.attend.kv.v, w_.attend.head_dim_v,
                                             to);
  }

 private:
  static constexpr std::int32_t kNowhere = -1;  ///< Zeros are to be had.

  __device__ static int lane() { return lane_of_thread(); }
  __device__ static int first_row() { return warp_of_thread() * ConfigT::kWarpKeys; }

  /// Of the row that the lane looked up; bytes.
  [[nodiscard]] __device__ std::int64_t own_offset(const PagedTensor& tensor) const {
    if (static_cast<std::uint32_t>(page_) >= static_cast<std::uint32_t>(w_.num_pages))
      return kNoOffset;
    const auto key = static_cast<std::uint32_t>(key_);
    const std::uint32_t slot =
        key - divide(key, w_.by_page) * static_cast<std::uint32_t>(w_.attend.kv.page_size);
    return (page_ * tensor.page_stride + slot * tensor.slot_stride) * 2;
  }

  /// A warp copies 32 chunks of a row at once, and what is left of kWarpKeys rows of 72 chunks, 8
  /// of each, together.
  template <typename RowsT, int kDim>
  __device__ void load(const char* head, const PagedTensor& tensor, int dim, SmemAddress to) const {
    constexpr int kWhole = kDim / kChunk / kLanes;
    constexpr int kRest = kDim / kChunk % kLanes;
    static_assert(kRest == 0 || kRest * ConfigT::kWarpKeys == kLanes);
    const std::int64_t own = own_offset(tensor);
    const auto copy = [&](std::int64_t offset, int row, int chunk) {
      const bool valid = offset != kNoOffset && chunk * kChunk < dim;
      cuda::copy_async(to + place_of<RowsT>(first_row() + row, chunk),
                       valid ? head + offset + chunk * (kChunk * 2) : head, valid);
    };
#pragma unroll
    for (int row = 0; row < ConfigT::kWarpKeys; ++row) {
      const std::int64_t offset = __shfl_sync(kAllLanes, own, row);
#pragma unroll
      for (int i = 0; i < kWhole; ++i) copy(offset, row, i * kLanes + lane());
    }
    if constexpr (kRest > 0) {
      const int row = lane() / kRest;
      copy(__shfl_sync(kAllLanes, own, row), row, kWhole * kLanes + lane() % kRest);
    }
  }

  const Work& w_;
  const Item& item_;
  std::int32_t key_ = 0;  ///< That the lane looked up.
  std::int32_t page_ = kNowhere;
};

}  // namespace octavo::kernels::flash2
