// SPDX-License-Identifier: Apache-2.0
#include "dispatch/cuda/upload.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace octavo::dispatch {
namespace {

constexpr std::size_t kInt = sizeof(std::int32_t);

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Upload::Upload(const CacheConfig& config, std::int32_t max_pages_per_seq)
    : config_(config), max_pages_per_seq_(max_pages_per_seq), groups_(config.num_pages) {
  const auto seqs = static_cast<std::size_t>(config.max_num_seqs);
  const std::size_t table = seqs * static_cast<std::size_t>(max_pages_per_seq);
  entries_per_upload_ = static_cast<std::int32_t>(
      std::min<std::size_t>(table, static_cast<std::size_t>(kEntriesPerUpload)));
  copies_per_upload_ = static_cast<std::int32_t>(
      std::min<std::int64_t>(config.num_pages, std::int64_t{kCopiesPerUpload}));

  const std::size_t row = aligned(seqs * kInt);
  const std::size_t offsets = aligned((seqs + 1) * kInt);
  arrays_ = device::GpuBuffer(config.device, offsets + 3 * row + table * kInt,
                              device::GpuBuffer::Fill::Zero, "page table");
  const auto at = [&](std::size_t bytes) {
    return reinterpret_cast<std::int32_t*>(arrays_.data() + bytes);
  };
  resident_ = {.token_offsets = at(0),
               .kv_lens = at(offsets),
               .rows = at(offsets + row),
               .clear_lens = at(offsets + 2 * row),
               .page_table = at(offsets + 3 * row),
               .max_num_seqs = config.max_num_seqs};

  entries_offset_ = offsets + 3 * row;
  values_offset_ = entries_offset_ + aligned(static_cast<std::size_t>(entries_per_upload_) * 8);
  copies_offset_ = values_offset_ + aligned(static_cast<std::size_t>(entries_per_upload_) * kInt);
  const std::size_t bytes =
      copies_offset_ + static_cast<std::size_t>(copies_per_upload_) * sizeof(PageCopy);
  const device::DeviceGuard guard(config.device);
  for (Staging& staging : ring_) {
    staging.memory = device::PinnedBuffer(config.device, bytes, "upload ring");
    staging.used = device::Event::make();
  }
}

Upload::~Upload() {
  for (Staging& staging : ring_) {
    try {
      staging.used.wait();
    } catch (const Error&) {
      // The device failed: whoever enqueues next is told.
    }
  }
}

Upload::Staging& Upload::next_staging() {
  newest_ = (newest_ + 1) % kRing;
  ring_[newest_].used.wait();
  return ring_[newest_];
}

/// Sends entries from `entry` of sequence `seq` on, as many as a buffer holds; moves both on.
void Upload::send_entries(const detail::PlanData& plan, std::size_t& seq, std::int32_t& entry,
                          Staging& staging, bool with_sequences, Stream stream) {
  const std::size_t num_seqs = plan.ids.size();
  std::byte* memory = staging.memory.data();
  kernels::cuda::ScatterParams params{.to = resident_,
                                      .has_sequences = with_sequences,
                                      .num_seqs = static_cast<std::int32_t>(num_seqs),
                                      .num_tokens = plan.num_tokens};
  if (with_sequences) {
    const auto seqs = static_cast<std::size_t>(config_.max_num_seqs);
    const std::size_t row = aligned(seqs * kInt);
    std::size_t place = 0;
    const auto put = [&](const std::vector<std::int32_t>& values, std::size_t room) {
      std::memcpy(memory + place, values.data(), values.size() * kInt);
      const auto* sent = reinterpret_cast<const std::int32_t*>(memory + place);
      place += room;
      return sent;
    };
    params.token_offsets = put(plan.token_offsets, aligned((seqs + 1) * kInt));
    params.kv_lens = put(plan.kv_lens, row);
    params.rows = put(plan.rows, row);
    params.clear_lens = put(plan.clear_lens, row);
  }
  auto* places = reinterpret_cast<std::int64_t*>(memory + entries_offset_);
  auto* values = reinterpret_cast<std::int32_t*>(memory + values_offset_);
  std::int32_t count = 0;
  for (; seq < num_seqs; ++seq) {
    const std::int32_t end = plan.entry_offsets[seq + 1];
    const std::int64_t first = std::int64_t{plan.rows[seq]} * max_pages_per_seq_ +
                               plan.first_entries[seq] - plan.entry_offsets[seq];
    for (; entry < end && count < entries_per_upload_; ++entry, ++count) {
      places[count] = first + entry;
      values[count] = plan.entries[static_cast<std::size_t>(entry)];
    }
    if (entry < end) break;
  }
  params.num_entries = count;
  params.entry_places = places;
  params.entry_values = values;
  device::check(scatter_step(params, stream.handle), "scatter_step");
}

void Upload::send_copies(std::span<const PageCopy> copies, const GpuStorage& storage,
                         Staging& staging, Stream stream) {
  auto* list = reinterpret_cast<PageCopy*>(staging.memory.data() + copies_offset_);
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
  std::size_t seq = 0;
  std::int32_t entry = 0;
  std::span<const PageCopy> copies(plan.copies);
  bool first = true;
  while (first || seq < plan.ids.size() || !copies.empty()) {
    Staging& staging = next_staging();
    if (first || seq < plan.ids.size()) send_entries(plan, seq, entry, staging, first, stream);
    const std::size_t count = std::min(copies.size(), static_cast<std::size_t>(copies_per_upload_));
    send_copies(copies.first(count), storage, staging, stream);
    copies = copies.subspan(count);
    staging.used.record(stream);
    first = false;
  }
  device::sync_if_asked(stream, "begin");
}

}  // namespace octavo::dispatch
