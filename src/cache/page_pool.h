// SPDX-License-Identifier: Apache-2.0
// The pool of pages: which are free, and how many owners each of the others has. Host only; knows
// no sequence and no byte of storage. Every operation is O(1) and none allocates after
// construction.
#pragma once

#include <cstdint>
#include <vector>

namespace octavo::cache {

class PagePool {
 public:
  /// All pages free; page 0 is the first to be taken.
  explicit PagePool(std::int32_t num_pages);

  /// A free page with one owner. There must be one.
  std::int32_t take();
  /// One more owner for a page in use.
  void share(std::int32_t page);
  /// One owner less; with the last one gone the page is free, and the next to be taken.
  void drop(std::int32_t page);

  [[nodiscard]] std::int32_t num_owners(std::int32_t page) const {
    return num_owners_[static_cast<std::size_t>(page)];
  }
  [[nodiscard]] std::int32_t num_pages() const {
    return static_cast<std::int32_t>(num_owners_.size());
  }
  [[nodiscard]] std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }
  /// Pages with more than one owner.
  [[nodiscard]] std::int32_t num_shared() const { return num_shared_; }

 private:
  std::vector<std::int32_t> num_owners_;
  std::vector<std::int32_t> free_;  // a stack, so that an undone take is the next one again
  std::int32_t num_shared_ = 0;
};

}  // namespace octavo::cache
