// SPDX-License-Identifier: Apache-2.0
// From the caller's sequence ids to rows: a hash table of fixed capacity with linear probing, since
// std::unordered_map would allocate whenever a sequence arrives.
#pragma once

#include <cstdint>
#include <vector>

namespace octavo::cache {

class IdMap {
 public:
  static constexpr std::int32_t kNone = -1;

  /// For at most `capacity` ids at once.
  explicit IdMap(std::int32_t capacity);

  /// The row of an id, or kNone.
  [[nodiscard]] std::int32_t find(std::int64_t id) const { return cells_[locate(id)].row; }
  /// Adds an id that is not there.
  void insert(std::int64_t id, std::int32_t row);
  /// Removes an id that is there.
  void erase(std::int64_t id);

 private:
  struct Cell {
    std::int64_t id = 0;
    std::int32_t row = kNone;
  };

  [[nodiscard]] std::size_t home(std::int64_t id) const {
    // A multiplicative mix: callers' ids are often consecutive or multiples of a power of two.
    const std::uint64_t mixed = static_cast<std::uint64_t>(id) * 0x9E3779B97F4A7C15U;
    return static_cast<std::size_t>(mixed ^ (mixed >> 32U)) & mask_;
  }
  [[nodiscard]] std::size_t next(std::size_t cell) const { return (cell + 1) & mask_; }
  /// Its cell, or the empty one where it would go.
  [[nodiscard]] std::size_t locate(std::int64_t id) const {
    std::size_t cell = home(id);
    while (cells_[cell].row != kNone && cells_[cell].id != id) cell = next(cell);
    return cell;
  }

  std::vector<Cell> cells_;
  std::size_t mask_;
};

}  // namespace octavo::cache
