// SPDX-License-Identifier: Apache-2.0
#include <octavo/cache.h>

#include <cstring>
#include <new>
#include <stdexcept>

#include "api/cache_impl.h"
#include "api/config.h"
#include "base/error.h"

namespace octavo {
namespace detail {
namespace {

cache::StoreConfig store_config(const CacheConfig& c) {
  return {.kind = c.kind,
          .max_num_seqs = c.max_num_seqs,
          .max_seq_len = static_cast<std::int32_t>(c.max_seq_len),
          .page_size = c.page_size,
          .num_pages = static_cast<std::int32_t>(c.num_pages)};
}

std::int64_t elements_per_layer(const CacheConfig& c, std::int32_t head_dim) {
  return c.num_pages * c.page_size * c.num_kv_heads * head_dim;
}

std::size_t storage_bytes(const CacheConfig& c, std::int32_t head_dim) {
  return static_cast<std::size_t>(c.num_layers * elements_per_layer(c, head_dim) *
                                  dtype_bytes(c.dtype));
}

/// Elements from layer to layer.
std::int64_t layer_stride(const CacheConfig& c, const TensorView& callers, std::int32_t head_dim) {
  return callers.data != nullptr ? callers.strides[0] : elements_per_layer(c, head_dim);
}

/// The tensor of a layer, in our storage or in the caller's.
kernels::PagedTensor layer_tensor(const CacheConfig& c, std::byte* storage,
                                  const TensorView& callers, std::int32_t layer,
                                  std::int32_t head_dim) {
  const std::int64_t offset = layer * layer_stride(c, callers, head_dim) * dtype_bytes(c.dtype);
  if (callers.data != nullptr) {
    const auto& strides = callers.strides;
    return {.data = static_cast<std::byte*>(callers.data) + offset,
            .page_stride = strides[1],
            .slot_stride = strides[2],
            .head_stride = strides[3],
            .dim_stride = strides[4]};
  }
  const std::int64_t slot_stride = std::int64_t{c.num_kv_heads} * head_dim;
  return {.data = storage + offset,
          .page_stride = c.page_size * slot_stride,
          .slot_stride = slot_stride,
          .head_stride = head_dim,
          .dim_stride = 1};
}

/// Copies the first `num_slots` slots of a page, in one layer. Dense pages are one run of bytes.
void copy_slots(const kernels::PagedTensor& tensor, const CacheConfig& c, std::int32_t head_dim,
                const PageCopy& copy) {
  const std::int64_t element = dtype_bytes(c.dtype);
  auto* bytes = static_cast<std::byte*>(tensor.data);
  std::byte* to = bytes + copy.destination * tensor.page_stride * element;
  const std::byte* from = bytes + copy.source * tensor.page_stride * element;
  const auto move = [&](std::int64_t offset, std::int64_t count) {
    std::memcpy(to + offset * element, from + offset * element,
                static_cast<std::size_t>(count * element));
  };
  const std::int64_t per_slot = std::int64_t{c.num_kv_heads} * head_dim;
  if (tensor.dim_stride == 1 && tensor.head_stride == head_dim && tensor.slot_stride == per_slot) {
    move(0, copy.num_slots * per_slot);
    return;
  }
  for (std::int64_t i = 0; i < copy.num_slots * per_slot; ++i) {
    move(i / per_slot * tensor.slot_stride + i % per_slot / head_dim * tensor.head_stride +
             i % head_dim * tensor.dim_stride,
         1);
  }
}

device::Buffer storage_for(const CacheConfig& c, const TensorView& callers, std::int32_t head_dim,
                           const char* what) {
  if (callers.data != nullptr) return {};
  return {c.device, storage_bytes(c, head_dim), what};
}

}  // namespace

CacheImpl::CacheImpl(const CacheConfig& checked_config)
    : config(checked_config),
      store(store_config(config)),
      keys(storage_for(config, config.keys, config.head_dim, "keys")),
      values(storage_for(config, config.values, config.head_dim_v, "values")) {
  if (config.device.type == DeviceType::Cuda) {
    gpu = dispatch::make_gpu_cache(config, store.max_pages_per_seq());
  } else {
    begun_table = std::make_unique_for_overwrite<std::int32_t[]>(
        static_cast<std::size_t>(config.max_num_seqs) *
        static_cast<std::size_t>(store.max_pages_per_seq()));
  }
}

kernels::KvPages CacheImpl::pages_of_layer(std::int32_t layer) const {
  return {.k = layer_tensor(config, keys.data(), config.keys, layer, config.head_dim),
          .v = layer_tensor(config, values.data(), config.values, layer, config.head_dim_v),
          .dtype = config.dtype,
          .num_pages = config.num_pages,
          .page_size = config.page_size};
}

dispatch::GpuStorage CacheImpl::gpu_storage() const {
  return {.pages = pages_of_layer(0),
          .k_layer_stride = layer_stride(config, config.keys, config.head_dim),
          .v_layer_stride = layer_stride(config, config.values, config.head_dim_v)};
}

kernels::StepBatch CacheImpl::begun_batch() const {
  return gpu != nullptr ? gpu->batch(begun.num_seqs(), begun.num_tokens()) : begun_host_batch();
}

kernels::StepBatch CacheImpl::begun_host_batch() const {
  const PlanData& plan = *begun.data();
  return {.num_seqs = static_cast<std::int32_t>(plan.ids.size()),
          .num_tokens = plan.num_tokens,
          .token_offsets = plan.token_offsets.data(),
          .kv_lens = plan.kv_lens.data(),
          .rows = plan.rows.data(),
          .page_table = begun_table.get(),
          .page_table_stride = store.max_pages_per_seq(),
          .clear_lens = plan.clear_lens.data()};
}

}  // namespace detail

namespace {

std::unique_ptr<detail::CacheImpl> make_impl(const CacheConfig& config) {
  try {
    return std::make_unique<detail::CacheImpl>(config);
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  throw Error(ErrorCode::OutOfMemory,
              fmt::format("CacheConfig: wanted tables for {} sequences of {} tokens and {} pages, "
                          "got no memory for them",
                          config.max_num_seqs, config.max_seq_len, config.num_pages));
}

void check_own(const StepPlan& plan, const detail::CacheImpl& impl) {
  if (plan.data() == nullptr) base::throw_mismatch("plan", "a plan of this cache", "an empty one");
  if (plan.data()->cache_id != impl.planner.cache_id()) {
    base::throw_mismatch("plan", "a plan of this cache", "another cache's");
  }
  if (plan.version() != impl.store.version()) {
    base::throw_mismatch("plan", fmt::format("the cache's version, {}", impl.store.version()),
                         fmt::format("version {}", plan.version()),
                         "the cache changed since: plan again");
  }
}

void check_layer(std::int32_t layer, const CacheConfig& config) {
  if (layer < 0 || layer >= config.num_layers) {
    base::throw_mismatch("layer", fmt::format("0 … {}", config.num_layers - 1), layer);
  }
}

TensorView storage_view(const kernels::PagedTensor& tensor, const CacheConfig& c,
                        std::int32_t head_dim) {
  TensorView view(tensor.data, c.dtype, {c.num_pages, c.page_size, c.num_kv_heads, head_dim},
                  c.device);
  view.strides = {tensor.page_stride, tensor.slot_stride, tensor.head_stride, tensor.dim_stride};
  return view;
}

/// The CPU's begin: entries into the table, then the copies, layer by layer.
void begin_on_host(detail::CacheImpl& impl, const detail::PlanData& d) {
  for (std::size_t b = 0; b < d.ids.size(); ++b) {
    const auto first = static_cast<std::size_t>(d.entry_offsets[b]);
    const auto count = static_cast<std::size_t>(d.entry_offsets[b + 1]) - first;
    if (count == 0) continue;
    std::int32_t* row =
        impl.begun_table.get() + std::int64_t{d.rows[b]} * impl.store.max_pages_per_seq();
    std::memcpy(row + d.first_entries[b], d.entries.data() + first, count * sizeof(std::int32_t));
  }
  for (std::int32_t layer = 0; layer < impl.config.num_layers && !d.copies.empty(); ++layer) {
    const kernels::KvPages pages = impl.pages_of_layer(layer);
    for (const PageCopy& copy : d.copies) {
      detail::copy_slots(pages.k, impl.config, impl.config.head_dim, copy);
      detail::copy_slots(pages.v, impl.config, impl.config.head_dim_v, copy);
    }
  }
}

}  // namespace

CacheSizes cache_sizes(const CacheConfig& config) {
  const CacheConfig c = api::checked(config);
  CacheSizes sizes;
  sizes.keys = static_cast<std::int64_t>(detail::storage_bytes(c, c.head_dim));
  sizes.values = static_cast<std::int64_t>(detail::storage_bytes(c, c.head_dim_v));
  if (c.device.type == DeviceType::Cuda) {
    sizes.workspace = static_cast<std::int64_t>(dispatch::default_gpu_workspace(c));
    sizes.least_workspace = static_cast<std::int64_t>(dispatch::least_gpu_workspace(c));
  }
  return sizes;
}

KvCache::KvCache(const CacheConfig& config) : impl_(make_impl(api::checked(config))) {}
KvCache::~KvCache() = default;
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;

PlanOutcome KvCache::plan(std::span<const SequenceStep> step) {
  return impl_->planner.plan(impl_->store, step);
}

void KvCache::undo(const StepPlan& plan) {
  check_own(plan, *impl_);
  if (!impl_->store.can_undo())
    base::throw_mismatch("plan", "one that was not begun", "one that was");
  impl_->store.undo_reservation();
}

void KvCache::begin(const StepPlan& plan, Stream stream) {
  check_own(plan, *impl_);
  if (!impl_->store.can_undo())
    base::throw_mismatch("plan", "one that was not begun", "one that was");
  if (impl_->gpu != nullptr) {
    const device::DeviceGuard guard(impl_->config.device);
    device::check_stream(impl_->config.device, stream);
    impl_->gpu->begin(*plan.data(), impl_->gpu_storage(), stream);
  } else {
    begin_on_host(*impl_, *plan.data());
  }
  impl_->store.commit_reservation();
  impl_->begun = plan;
}

void KvCache::release(SequenceId id) { impl_->store.release(id); }
void KvCache::truncate(SequenceId id, std::int64_t length) { impl_->store.truncate(id, length); }
ForkOutcome KvCache::fork(SequenceId from, SequenceId to) {
  return ForkOutcome(impl_->store.fork(from, to));
}

bool KvCache::contains(SequenceId id) const noexcept { return impl_->store.contains(id); }
std::int64_t KvCache::length(SequenceId id) const { return impl_->store.length(id); }

std::vector<std::int32_t> KvCache::page_ids(SequenceId id) const {
  const auto pages = impl_->store.pages(id);
  return {pages.begin(), pages.end()};
}

std::vector<SequenceId> KvCache::sequence_ids() const { return impl_->store.sequence_ids(); }

CacheStats KvCache::stats() const {
  const auto& pool = impl_->store.pool();
  const auto usage = impl_->store.usage();
  CacheStats stats;
  stats.num_seqs = impl_->store.num_seqs();
  stats.num_tokens = usage.num_tokens;
  stats.pages_total = pool.num_pages();
  stats.pages_free = pool.num_free();
  stats.pages_used = stats.pages_total - stats.pages_free;
  stats.pages_shared = pool.num_shared();
  stats.slots_used = stats.pages_used * impl_->config.page_size;
  stats.slots_wasted = usage.slots_wasted;
  stats.bytes = static_cast<std::int64_t>(impl_->keys.size() + impl_->values.size());
  return stats;
}

const CacheConfig& KvCache::config() const noexcept { return impl_->config; }
std::uint64_t KvCache::version() const noexcept { return impl_->store.version(); }

TensorView KvCache::key_storage(std::int32_t layer) {
  check_layer(layer, impl_->config);
  return storage_view(impl_->pages_of_layer(layer).k, impl_->config, impl_->config.head_dim);
}

TensorView KvCache::value_storage(std::int32_t layer) {
  check_layer(layer, impl_->config);
  return storage_view(impl_->pages_of_layer(layer).v, impl_->config, impl_->config.head_dim_v);
}

void KvCache::audit() const { impl_->store.audit(); }

}  // namespace octavo
