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
  [[nodiscard]] std::int32_t find(std::int64_t id) const;
  /// Adds an id that is not there.
  void insert(std::int64_t id, std::int32_t row);
  /// Removes an id that is there.
  void erase(std::int64_t id);

 private:
  struct Cell {
    std::int64_t id = 0;
    std::int32_t row = kNone;
  };

  [[nodiscard]] std::size_t home(std::int64_t id) const;
  [[nodiscard]] std::size_t next(std::size_t cell) const { return (cell + 1) & mask_; }
  [[nodiscard]] std::size_t locate(
      std::int64_t id) const;  // its cell, or the empty one where it would go

  std::vector<Cell> cells_;
  std::size_t mask_;
};

}  // namespace octavo::cache
