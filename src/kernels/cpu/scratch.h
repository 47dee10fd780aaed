// SPDX-License-Identifier: Apache-2.0
// Cuts a workspace into aligned arrays. Run once over a null workspace, the same cuts give the size
// that is needed, so that size and use can't disagree.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::kernels::cpu {

class Scratch {
 public:
  static constexpr std::size_t kAlignment = 64;

  /// Null: counts only.
  explicit Scratch(void* memory) : address_(reinterpret_cast<std::uintptr_t>(memory)) {}

  template <typename T>
  T* take(std::int64_t count) {
    const std::size_t start = padding() + used_;
    used_ += round_up(static_cast<std::size_t>(count) * sizeof(T));
    return address_ == 0 ? nullptr : reinterpret_cast<T*>(address_ + start);
  }

  /// Bytes of a workspace of any alignment that holds all cuts so far.
  [[nodiscard]] std::size_t bytes() const { return used_ + kAlignment; }

 private:
  static std::size_t round_up(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  [[nodiscard]] std::size_t padding() const {
    return (kAlignment - address_ % kAlignment) % kAlignment;
  }

  std::uintptr_t address_;
  std::size_t used_ = 0;
};

}  // namespace octavo::kernels::cpu
