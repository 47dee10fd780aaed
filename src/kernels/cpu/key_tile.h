// SPDX-License-Identifier: Apache-2.0
// Which keys of a tile the rows of a unit see, and where they lie: the page walk of the tiled
// attention.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/unit.h"

namespace octavo::kernels::cpu {

// Keys of a tile that a row sees, [begin, end) inside the tile; begin >= end: none.
struct Span {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  bool operator==(const Span& other) const { return begin == other.begin && end == other.end; }
  [[nodiscard]] bool empty() const { return begin >= end; }
  [[nodiscard]] std::int64_t size() const { return end - begin; }
};

struct KeyTile {
  std::int64_t first = 0;  // position
  Span seen;               // by any row of the unit
  bool uniform = false;    // every row sees the same
  std::int64_t k_offsets[kKeyTile];
  std::int64_t v_offsets[kKeyTile];
};

inline Span clip(const KeyRange& keys, std::int64_t first) {
  const auto inside = [first](std::int64_t position) {
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(position - first, 0, kKeyTile));
  };
  const Span span{inside(keys.begin), inside(keys.end)};
  return span.empty() ? Span{} : span;
}

// Looks up the tile's slots. Keys that no row sees get the place of one that is seen: kernels that
// take keys by fours read it and throw the result away.
inline void locate(const Unit& unit, std::int64_t tile_idx, KeyTile& tile) {
  const AttendParams& p = *unit.params;
  tile.first = tile_idx * kKeyTile;
  const KeyRange first_token = keys_of(unit, unit.first_token);
  const KeyRange last_token = keys_of(unit, unit.first_token + unit.num_tokens - 1);
  tile.seen = clip({first_token.begin, last_token.end}, tile.first);
  // Not by comparing the two: under a window both may end outside the tile, on either side of it.
  tile.uniform =
      clip(first_token, tile.first) == tile.seen && clip(last_token, tile.first) == tile.seen;
  if (tile.seen.empty()) return;

  const std::int32_t page_size = p.kv.page_size;
  const std::int64_t position = tile.first + tile.seen.begin;
  auto page_idx = static_cast<std::int32_t>(position / page_size);
  auto slot = static_cast<std::int32_t>(position % page_size);
  const std::int64_t k_step = p.kv.k.slot_stride, v_step = p.kv.v.slot_stride;
  for (std::int32_t key = tile.seen.begin; key < tile.seen.end; slot = 0) {
    const std::int64_t page = page_of(p.batch, unit.b, page_idx++);
    const std::int32_t stop = std::min(tile.seen.end, key + page_size - slot);
    std::int64_t k_at = page * p.kv.k.page_stride + slot * k_step;
    std::int64_t v_at = page * p.kv.v.page_stride + slot * v_step;
    for (; key < stop; ++key, k_at += k_step, v_at += v_step) {
      tile.k_offsets[key] = k_at;
      tile.v_offsets[key] = v_at;
    }
  }
  std::fill_n(tile.k_offsets, tile.seen.begin, tile.k_offsets[tile.seen.begin]);
  std::fill(tile.k_offsets + tile.seen.end, tile.k_offsets + kKeyTile,
            tile.k_offsets[tile.seen.end - 1]);
}

}  // namespace octavo::kernels::cpu
