// SPDX-License-Identifier: Apache-2.0
// Cuts a list of page copies, which are carried out in order, into groups that may run at once.
#pragma once

#include <octavo/plan.h>

#include <cstdint>
#include <span>
#include <vector>

namespace octavo::dispatch {

class CopyGroups {
 public:
  explicit CopyGroups(std::int64_t num_pages)
      : read_(static_cast<std::size_t>(num_pages), 0),
        written_(static_cast<std::size_t>(num_pages), 0) {}

  /// How many of the first `copies` may run at once: until one reads what an earlier one writes, or
  /// writes what an earlier one reads or writes.
  std::size_t first_group(std::span<const PageCopy> copies) {
    ++stamp_;
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const auto source = static_cast<std::size_t>(copies[i].source);
      const auto destination = static_cast<std::size_t>(copies[i].destination);
      if (written_[source] == stamp_ || written_[destination] == stamp_ ||
          read_[destination] == stamp_) {
        return i;
      }
      read_[source] = stamp_;
      written_[destination] = stamp_;
    }
    return copies.size();
  }

 private:
  std::vector<std::uint64_t> read_;     // by page: the last group that reads it
  std::vector<std::uint64_t> written_;  // likewise
  std::uint64_t stamp_ = 0;
};

}  // namespace octavo::dispatch
