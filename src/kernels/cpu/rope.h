// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of one head's row, and the cosines and sines of one position. Append
// (K) and both attentions (q) share it, so that they turn alike.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/config.h"
#include "kernels/params.h"

namespace octavo::kernels::cpu {

constexpr std::int32_t kMaxRotaryPairs = kMaxHeadDim / 2;

/// Tokens whose angles one thread has before a second has woken.
constexpr std::int32_t kFewAngles = 64;

/// Cosines and sines of one position, [rotary_dim / 2] each.
struct Angles {
  const float* cos;
  const float* sin;
};

/// Gives the angles of positions: rows of the caller's tables, or computed.
class RopeAngles {
 public:
  /// `turns`: what compute_turns wrote, or null.
  explicit RopeAngles(const RopeParams& rope, const float* turns = nullptr)
      : rope_(rope), turns_(turns), pairs_(rope.rotary_dim / 2) {
    if (!computed()) return;
    for (std::int32_t i = 0; i < pairs_; ++i) {
      frequencies_[static_cast<std::size_t>(i)] =
          std::pow(rope.base, -2.0 * i / static_cast<double>(rope.rotary_dim));
    }
  }

  [[nodiscard]] bool computed() const { return rope_.cos == nullptr && turns_ == nullptr; }

  /// Angles of token `token` (packed), whose place in the sequence is `planned`; `buffer`
  /// [rotary_dim] holds them where they are computed.
  [[nodiscard]] Angles at(std::int32_t token, std::int64_t planned, float* buffer) const {
    if (turns_ != nullptr) {
      const float* row = turns_ + std::int64_t{token} * rope_.rotary_dim;
      return {row, row + pairs_};
    }
    const std::int64_t position = rope_.positions != nullptr ? rope_.positions[token] : planned;
    if (rope_.cos != nullptr) return {rope_.cos + position * pairs_, rope_.sin + position * pairs_};
    for (std::int32_t i = 0; i < pairs_; ++i) {
      const double angle =
          static_cast<double>(position) * frequencies_[static_cast<std::size_t>(i)];
      buffer[i] = static_cast<float>(std::cos(angle));
      buffer[pairs_ + i] = static_cast<float>(std::sin(angle));
    }
    return {buffer, buffer + pairs_};
  }

 private:
  RopeParams rope_;
  const float* turns_;
  std::int32_t pairs_;
  std::array<double, kMaxRotaryPairs> frequencies_{};
};

/// Turns the first rotary_dim elements of `row` in place.
inline void rotate(const RopeParams& rope, const Angles& angles, float* row) {
  const std::int32_t pairs = rope.rotary_dim / 2;
  const bool half = rope.style == RopeStyle::Half;
  for (std::int32_t i = 0; i < pairs; ++i) {
    float& first = row[half ? i : 2 * i];
    float& second = row[half ? i + pairs : 2 * i + 1];
    const float x = first, y = second;
    first = x * angles.cos[i] - y * angles.sin[i];
    second = x * angles.sin[i] + y * angles.cos[i];
  }
}

}  // namespace octavo::kernels::cpu
