// SPDX-License-Identifier: Apache-2.0
#include "cache/id_map.h"

#include <bit>

#include "base/error.h"

namespace octavo::cache {

IdMap::IdMap(std::int32_t capacity)
    : cells_(std::bit_ceil(static_cast<std::size_t>(capacity) * 2)), mask_(cells_.size() - 1) {}

std::size_t IdMap::home(std::int64_t id) const {
  // A multiplicative mix: callers' ids are often consecutive or multiples of a power of two.
  const std::uint64_t mixed = static_cast<std::uint64_t>(id) * 0x9E3779B97F4A7C15U;
  return static_cast<std::size_t>(mixed ^ (mixed >> 32U)) & mask_;
}

std::size_t IdMap::locate(std::int64_t id) const {
  std::size_t cell = home(id);
  while (cells_[cell].row != kNone && cells_[cell].id != id) cell = next(cell);
  return cell;
}

std::int32_t IdMap::find(std::int64_t id) const { return cells_[locate(id)].row; }

void IdMap::insert(std::int64_t id, std::int32_t row) {
  Cell& cell = cells_[locate(id)];
  OCTAVO_CHECK(cell.row == kNone);
  cell = {id, row};
}

void IdMap::erase(std::int64_t id) {
  std::size_t hole = locate(id);
  OCTAVO_CHECK(cells_[hole].row != kNone);
  // Cells behind the hole move up where their way from home passes it, so that no search stops
  // short.
  for (std::size_t cell = next(hole); cells_[cell].row != kNone; cell = next(cell)) {
    const std::size_t way = (cell - home(cells_[cell].id)) & mask_;
    if (way >= ((cell - hole) & mask_)) {
      cells_[hole] = cells_[cell];
      hole = cell;
    }
  }
  cells_[hole] = Cell{};
}

}  // namespace octavo::cache
