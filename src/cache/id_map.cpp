// SPDX-License-Identifier: Apache-2.0
#include "cache/id_map.h"

#include <bit>

#include "base/error.h"

namespace octavo::cache {

IdMap::IdMap(std::int32_t capacity)
    : cells_(std::bit_ceil(static_cast<std::size_t>(capacity) * 2)), mask_(cells_.size() - 1) {}

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
