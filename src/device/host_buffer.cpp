// SPDX-License-Identifier: Apache-2.0
#include "device/host_buffer.h"

#include <cstdlib>
#include <limits>
#include <memory>
#include <utility>

#include "base/error.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo::device {
namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21U;

/// Scattered pages of a large cache miss the TLB at every row; huge pages of the system cure that
/// where it grants them.
void ask_for_huge_pages(void* block, std::size_t num_bytes) {
#if defined(__linux__)
  void* begin = block;
  std::size_t space = num_bytes;
  if (std::align(kHugePage, kHugePage, begin, space) != nullptr) {
    static_cast<void>(madvise(begin, space / kHugePage * kHugePage, MADV_HUGEPAGE));  // a wish
  }
#else
  static_cast<void>(block);
  static_cast<void>(num_bytes);
#endif
}

}  // namespace

HostBuffer::HostBuffer(std::size_t num_bytes, const char* what) : num_bytes_(num_bytes) {
  if (num_bytes == 0) return;
  if (num_bytes <= std::numeric_limits<std::size_t>::max() - kAlignment) {
    block_ =
        std::calloc(num_bytes + kAlignment, 1);  // zero pages of the system, untouched until used
  }
  if (block_ == nullptr) {
    throw Error(
        ErrorCode::OutOfMemory,
        fmt::format("{}: wanted {} bytes of host memory, got none (take a smaller configuration)",
                    what, num_bytes));
  }
  ask_for_huge_pages(block_, num_bytes);
  void* aligned = block_;
  std::size_t space = num_bytes + kAlignment;
  data_ = static_cast<std::byte*>(std::align(kAlignment, num_bytes, aligned, space));
}

HostBuffer::~HostBuffer() { std::free(block_); }

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : block_(std::exchange(other.block_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      num_bytes_(std::exchange(other.num_bytes_, 0)) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  std::swap(block_, other.block_);
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

}  // namespace octavo::device
