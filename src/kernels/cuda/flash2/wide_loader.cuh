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

/// A key that a lane looked up, and its page.
struct FoundKey {
  std::int32_t key = 0;
  std::int32_t page = -1;  ///< Negative: zeros are to be had.
};

/// A warp brings kWarpKeys rows of each tile. A lane looks up one of them and tells the others
/// where it lies, so that it doesn't matter which rows share a page.
template <typename ConfigT>
class WideLoader {
 public:
  __device__ WideLoader(const Work& w, const Item& item) : w_(w), item_(item) {}

  /// Looks up the rows of a tile; what is found is not waited for before it is used. Keys that none
  /// of the tokens sees, and pages outside the pool, read as zeros: what lies there never spreads.
  [[nodiscard]] __device__ FoundKey look_up(int tile) const {
    FoundKey found{tile * ConfigT::kKeys + first_row() + lane() % ConfigT::kWarpKeys};
    if (tile >= item_.keys.end_tile || found.key < item_.keys.begin_key ||
        found.key >= item_.keys.end_key)
      return found;
    found.page = item_.row;
    if (w_.attend.batch.page_table != nullptr)
      found.page = item_.pages[divide(static_cast<std::uint32_t>(found.key), w_.by_page)];
    return found;
  }

  __device__ void load_keys(FoundKey found, SmemAddress to) const {
    load<ConfigT, ConfigT::kDim>(found, item_.k_head, w_.attend.kv.k, w_.attend.head_dim, to);
  }
  __device__ void load_values(FoundKey found, SmemAddress to) const {
    load<ValueRows<ConfigT>, ConfigT::kDimV>(found, item_.v_head, w_.attend.kv.v,
                                             w_.attend.head_dim_v, to);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ static int first_row() {
    return static_cast<int>(threadIdx.x) / kLanes * ConfigT::kWarpKeys;
  }

  /// Bytes.
  [[nodiscard]] __device__ std::int64_t offset_of(FoundKey found, const PagedTensor& tensor) const {
    if (static_cast<std::uint32_t>(found.page) >= static_cast<std::uint32_t>(w_.num_pages))
      return kNoOffset;
    const auto key = static_cast<std::uint32_t>(found.key);
    const std::uint32_t slot =
        key - divide(key, w_.by_page) * static_cast<std::uint32_t>(w_.attend.kv.page_size);
    return (found.page * tensor.page_stride + slot * tensor.slot_stride) * 2;
  }

  /// A warp copies 32 chunks of a row at once, and what is left of kWarpKeys rows of 72 chunks, 8
  /// of each, together.
  template <typename RowsT, int kDim>
  __device__ void load(FoundKey found, const char* head, const PagedTensor& tensor, int dim,
                       SmemAddress to) const {
    constexpr int kWhole = kDim / kChunk / kLanes;
    constexpr int kRest = kDim / kChunk % kLanes;
    static_assert(kRest * ConfigT::kWarpKeys <= kLanes);
    const std::int64_t own = offset_of(found, tensor);
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
      const std::int64_t offset = __shfl_sync(kAllLanes, own, row);
      if (row < ConfigT::kWarpKeys) copy(offset, row, kWhole * kLanes + lane() % kRest);
    }
  }

  const Work& w_;
  const Item& item_;
};

}  // namespace octavo::kernels::flash2
