// SPDX-License-Identifier: Apache-2.0
// Where rows of K and V lie, in units that let 32 bits say it. Compiles without CUDA.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/params.h"

namespace octavo::kernels::flash2 {

inline constexpr std::int64_t kElementBytes = 2;  ///< Of the dtypes that flash2 takes.

/// Bytes that divide every step from page to page and from slot to slot.
inline std::int64_t row_unit_of(const KvPages& kv) {
  constexpr std::uint64_t kMostElements = std::uint64_t{1} << 29U;
  const std::uint64_t all = static_cast<std::uint64_t>(kv.k.page_stride | kv.k.slot_stride |
                                                       kv.v.page_stride | kv.v.slot_stride) |
                            kMostElements;
  return static_cast<std::int64_t>(all & (~all + 1)) * kElementBytes;
}

/// Whether every row lies less than 2^31 such units from the first.
inline bool has_near_rows(const KvPages& kv) {
  const auto unit = static_cast<double>(row_unit_of(kv));
  const auto near = [&](const PagedTensor& tensor) {
    const double farthest =
        std::abs(static_cast<double>(tensor.page_stride)) * static_cast<double>(kv.num_pages) +
        std::abs(static_cast<double>(tensor.slot_stride)) * kv.page_size;
    return farthest * kElementBytes / unit < std::numeric_limits<std::int32_t>::max();
  };
  return near(kv.k) && near(kv.v);
}

}  // namespace octavo::kernels::flash2
