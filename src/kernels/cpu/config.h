// SPDX-License-Identifier: Apache-2.0
// The tile sizes of the cpu backend. The planner cuts work with them, so that a schedule depends on
// the plan alone and never on page size, cache kind or threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace octavo::kernels::cpu {

/// Keys of a tile. Tiles start at multiples of it, whatever the page.
constexpr std::int32_t kKeyTile = 64;

/// Rows (token, head of the group) of a query tile: enough for a tile's packing of K and V to cost
/// little beside its products, few enough for their output to stay in the L2 cache.
constexpr std::int32_t kMaxTileRows = 192;

/// Tokens of a query tile.
constexpr std::int32_t q_tile_tokens(std::int32_t group_size) {
  return std::max<std::int32_t>(1, kMaxTileRows / group_size);
}

}  // namespace octavo::kernels::cpu
