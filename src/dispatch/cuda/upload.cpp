// SPDX-License-Identifier: Apache-2.0
#include "dispatch/cuda/upload.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace octavo::dispatch {
namespace {

constexpr std::size_t kInt = sizeof(std::int32_t);
constexpr std::size_t kSequenceArrays = 6;  // of an upload

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Upload::Upload(const CacheConfig& config, std::int32_t max_pages_per_seq)
    : config_(config), groups_(config.num_pages) {
  const auto seqs = static_cast<std::size_t>(config.max_num_seqs);
  const std::size_t table = seqs * static_cast<std::size_t>(max_pages_per_seq);
  // Every new token has a slot of its own.
  const std::int64_t tokens = std::min(config.num_pages * config.page_size,
                                       std::int64_t{config.max_num_seqs} * config.max_seq_len);
  entries_per_upload_ = static_cast<std::int32_t>(
      std::min<std::size_t>(table, static_cast<std::size_t>(kEntriesPerUpload)));
  copies_per_upload_ = static_cast<std::int32_t>(
      std::min<std::int64_t>(config.num_pages, std::int64_t{kCopiesPerUpload}));

  std::size_t place = 0;
  const auto take = [&](std::size_t bytes) { return std::exchange(place, place + aligned(bytes)); };
  const std::size_t offsets_at = take((seqs + 1) * kInt);
  const std::size_t lens_at = take(seqs * kInt);
  const std::size_t rows_at = take(seqs * kInt);
  const std::size_t clear_at = take(seqs * kInt);
  const std::size_t table_at = take(table * kInt);
  const std::size_t slots_at = take(static_cast<std::size_t>(tokens) * sizeof(kernels::TokenSlot));
  const std::size_t indices_at =
      take(static_cast<std::size_t>(tokens) * sizeof(kernels::TokenIndex));
  arrays_ = device::GpuBuffer(config.device, place, device::GpuBuffer::Fill::Zero,
                              "page table and slots of new tokens");
  const auto at = [&](std::size_t bytes) {
    return reinterpret_cast<std::int32_t*>(arrays_.data() + bytes);
  };
  resident_ = {.token_offsets = at(offsets_at),
               .kv_lens = at(lens_at),
               .rows = at(rows_at),
               .clear_lens = at(clear_at),
               .page_table = at(table_at),
               .token_slots = reinterpret_cast<kernels::TokenSlot*>(arrays_.data() + slots_at),
               .token_indices = reinterpret_cast<kernels::TokenIndex*>(arrays_.data() + indices_at),
               .max_num_seqs = config.max_num_seqs,
               .page_table_stride = max_pages_per_seq,
               .max_tokens = tokens};

  copies_offset_ = kSequenceArrays * aligned((seqs + 1) * kInt) +
                   aligned(static_cast<std::size_t>(entries_per_upload_) * kInt);
  const std::size_t bytes =
      copies_offset_ + static_cast<std::size_t>(copies_per_upload_) * sizeof(PageCopy);
  const device::DeviceGuard guard(config.device);
  for (Half& half : ring_) {
    for (device::PinnedBuffer& buffer : half.buffers) {
      buffer = device::PinnedBuffer(config.device, bytes, "upload ring");
    }
    half.used = device::Event::make();
  }
}

/// A host that is at most kHalf buffers ahead of the device waits for nothing.
std::byte* Upload::next_buffer(Stream stream) {
  newest_ = (newest_ + 1) % (ring_.size() * kHalf);
  Half& half = ring_[newest_ / kHalf];
  if (newest_ % kHalf == 0) {
    ring_[1 - newest_ / kHalf].used.record(stream);  // behind all that was enqueued from it
    half.used.wait();
  }
  return half.buffers[newest_ % kHalf].data();
}

/// Sends the step with `num_entries` of its entries.
void Upload::send_step(const detail::PlanData& plan, std::int32_t first_entry,
                       std::int32_t num_entries, std::byte* buffer, Stream stream) {
  std::byte* place = buffer;
  const auto put = [&](const std::int32_t* values, std::size_t count) {
    if (count > 0) std::memcpy(place, values, count * kInt);
    const auto* sent = reinterpret_cast<const std::int32_t*>(place);
    place += aligned(count * kInt);
    return sent;
  };
  const std::size_t num_seqs = plan.ids.size();
  kernels::cuda::ScatterParams params{.to = resident_,
                                      .page_size = plan.page_size,
                                      .num_seqs = static_cast<std::int32_t>(num_seqs),
                                      .num_tokens = plan.num_tokens,
                                      .first_entry = first_entry,
                                      .num_entries = num_entries};
  params.token_offsets = put(plan.token_offsets.data(), num_seqs + 1);
  params.entry_offsets = put(plan.entry_offsets.data(), num_seqs + 1);
  params.first_entries = put(plan.first_entries.data(), num_seqs);
  params.kv_lens = put(plan.kv_lens.data(), num_seqs);
  params.rows = put(plan.rows.data(), num_seqs);
  params.clear_lens = put(plan.clear_lens.data(), num_seqs);
  params.entries = put(plan.entries.data() + first_entry, static_cast<std::size_t>(num_entries));
  device::check(scatter_step(params, stream.handle), "scatter_step");
}

void Upload::send_copies(std::span<const PageCopy> copies, const GpuStorage& storage,
                         std::byte* buffer, Stream stream) {
  auto* list = reinterpret_cast<PageCopy*>(buffer + copies_offset_);
  std::copy(copies.begin(), copies.end(), list);
  kernels::cuda::PageCopyParams params{.num_layers = config_.num_layers,
                                       .k = storage.pages.k,
                                       .v = storage.pages.v,
                                       .k_layer_stride = storage.k_layer_stride,
                                       .v_layer_stride = storage.v_layer_stride,
                                       .num_kv_heads = config_.num_kv_heads,
                                       .head_dim = config_.head_dim,
                                       .head_dim_v = config_.head_dim_v};
  params.element_bytes = static_cast<std::int32_t>(dtype_bytes(config_.dtype));
  for (std::size_t first = 0; first < copies.size();) {
    const std::size_t count = groups_.first_group(copies.subspan(first));
    params.copies = list + first;
    params.num_copies = static_cast<std::int32_t>(count);
    params.most_slots = 0;
    for (const PageCopy& copy : copies.subspan(first, count)) {
      params.most_slots = std::max(params.most_slots, copy.num_slots);
    }
    if (params.most_slots > 0) device::check(copy_pages(params, stream.handle), "copy_pages");
    first += count;
  }
}

void Upload::begin(const detail::PlanData& plan, const GpuStorage& storage, Stream stream) {
  const auto all_entries = static_cast<std::int32_t>(plan.entries.size());
  std::int32_t entry = 0;
  std::span<const PageCopy> copies(plan.copies);
  bool first = true;
  while (first || entry < all_entries || !copies.empty()) {
    std::byte* const buffer = next_buffer(stream);
    if (first || entry < all_entries) {
      const std::int32_t num_entries = std::min(all_entries - entry, entries_per_upload_);
      send_step(plan, entry, num_entries, buffer, stream);
      entry += num_entries;
    }
    const std::size_t num_copies =
        std::min(copies.size(), static_cast<std::size_t>(copies_per_upload_));
    send_copies(copies.first(num_copies), storage, buffer, stream);
    copies = copies.subspan(num_copies);
    first = false;
  }
  device::sync_if_asked(stream, "begin");
}

}  // namespace octavo::dispatch
