// SPDX-License-Identifier: Apache-2.0
#include "testing/free_slots.h"

#include "testing/device_memory.h"
#include "testing/host_tensor.h"

#include <algorithm>

namespace octavo::testkit {

namespace {

constexpr std::int64_t kMostBytes = std::int64_t{1} << 29;

// One slot of a layer's storage [pages, slots, heads, dim], dense along dim; on a device, dense
// along heads too.
void poison_rows(const TensorView& storage, std::int64_t page, std::int64_t offset) {
  if (storage.device.type != DeviceType::Cpu) {
    const std::int64_t width = dtype_bytes(storage.dtype);
    const std::int64_t first = page * storage.strides[0] + offset * storage.strides[1];
    fill_device(storage.device, static_cast<std::byte*>(storage.data) + first * width,
                std::byte{0xFF},
                static_cast<std::size_t>(storage.shape[2] * storage.shape[3] * width));
    return;
  }
  for (std::int64_t head = 0; head < storage.shape[2]; ++head) {
    const std::int64_t first =
        page * storage.strides[0] + offset * storage.strides[1] + head * storage.strides[2];
    poison(storage.dtype, storage.data, first, storage.shape[3]);
  }
}

}  // namespace

FreeSlots::FreeSlots(KvCache& cache) : cache_(cache) {
  if (cache.stats().bytes > kMostBytes) return;
  const TensorView storage = cache.key_storage(0);
  page_slots_ = storage.shape[1];
  poisoned_.assign(static_cast<std::size_t>(storage.shape[0] * page_slots_), false);
}

void FreeSlots::poison() {
  if (poisoned_.empty()) return;
  std::vector<bool> holds_token(poisoned_.size(), false);
  for (const SequenceId id : cache_.sequence_ids()) {
    std::int64_t left = cache_.length(id);
    for (const std::int32_t page : cache_.page_ids(id)) {
      const auto first = holds_token.begin() + page * page_slots_;
      const std::int64_t held = std::min(left, page_slots_);
      std::fill(first, first + held, true);
      left -= held;
    }
  }
  for (std::size_t slot = 0; slot < poisoned_.size(); ++slot) {
    if (holds_token[slot]) {
      poisoned_[slot] = false;
    } else if (!poisoned_[slot]) {
      poison_slot(static_cast<std::int64_t>(slot));
      poisoned_[slot] = true;
    }
  }
}

void FreeSlots::planned(const StepPlan& plan) {
  if (poisoned_.empty()) return;
  const auto touch = [&](std::int32_t page) {
    const auto first = poisoned_.begin() + page * page_slots_;
    std::fill(first, first + page_slots_, false);
  };
  for (const std::int32_t page : plan.entries()) touch(page);
  for (const PageCopy& copy : plan.copies()) touch(copy.destination);
  if (cache_.config().kind == CacheKind::Contiguous) {
    for (const SequenceId id : plan.ids()) {
      for (const std::int32_t page : cache_.page_ids(id)) touch(page);
    }
  }
}

void FreeSlots::poison_slot(std::int64_t slot) {
  const std::int64_t page = slot / page_slots_;
  const std::int64_t offset = slot % page_slots_;
  for (std::int32_t layer = 0; layer < cache_.config().num_layers; ++layer) {
    poison_rows(cache_.key_storage(layer), page, offset);
    poison_rows(cache_.value_storage(layer), page, offset);
  }
}

}  // namespace octavo::testkit
