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

/// Scattered pages of a large cache miss the TLB at every row, and prefetches that miss it come
/// late; huge pages of the system cure that where it grants them. A block begins at one, its end
/// may lie in small pages: memory that nobody uses would be taken for it.
void ask_for_huge_pages(void* begin, std::size_t num_bytes) {
#if defined(__linux__)
  static_cast<void>(madvise(begin, num_bytes / kHugePage * kHugePage, MADV_HUGEPAGE));  // a wish
#else
  static_cast<void>(begin);
  static_cast<void>(num_bytes);
#endif
}

}  // namespace

HostBuffer::HostBuffer(std::size_t num_bytes, const char* what) : num_bytes_(num_bytes) {
  if (num_bytes == 0) return;
  const bool huge = num_bytes >= kHugePage;
  const std::size_t alignment = huge ? kHugePage : kAlignment;
  if (num_bytes <= std::numeric_limits<std::size_t>::max() - alignment) {
    block_ =
        std::calloc(num_bytes + alignment, 1);  // zero pages of the system, untouched until used
  }
  if (block_ == nullptr) {
    throw Error(
        ErrorCode::OutOfMemory,
        fmt::format("{}: wanted {} bytes of host memory, got none (take a smaller configuration)",
                    what, num_bytes));
  }
  void* aligned = block_;
  std::size_t space = num_bytes + alignment;
  data_ = static_cast<std::byte*>(std::align(alignment, num_bytes, aligned, space));
  if (huge) ask_for_huge_pages(data_, num_bytes);
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
