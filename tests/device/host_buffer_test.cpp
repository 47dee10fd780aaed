// SPDX-License-Identifier: Apache-2.0
// Memory of the host: where it begins, what is in it, what it says when there is none.
#include "device/host_buffer.h"

#include <octavo/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

namespace octavo::device {
namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21U;

std::uintptr_t address(const HostBuffer& buffer) {
  return reinterpret_cast<std::uintptr_t>(buffer.data());
}

TEST(HostBuffer, BeginsAtAHugePageWhenItFillsOne) {
  const HostBuffer buffer(kHugePage, "keys");
  EXPECT_EQ(address(buffer) % kHugePage, 0U);
}

TEST(HostBuffer, BeginsAtALineWhenItIsSmall) {
  const HostBuffer buffer(kHugePage - 1, "keys");
  EXPECT_EQ(address(buffer) % HostBuffer::kAlignment, 0U);
}

TEST(HostBuffer, IsZeroToItsLastByte) {
  const HostBuffer buffer(kHugePage + 100, "keys");
  const std::byte* begin = buffer.data();
  EXPECT_TRUE(
      std::all_of(begin, begin + buffer.size(), [](std::byte b) { return b == std::byte{0}; }));
}

TEST(HostBuffer, NamesWhatItHasNoMemoryFor) {
  try {
    const HostBuffer buffer(std::numeric_limits<std::size_t>::max() - 100, "keys");
    FAIL() << "wanted OutOfMemory, got a buffer";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::OutOfMemory);
    EXPECT_EQ(std::string_view(error.what()).substr(0, 5), "keys:");
  }
}

}  // namespace
}  // namespace octavo::device
