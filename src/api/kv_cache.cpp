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

kernels::PagedTensor layer_tensor(const CacheConfig& c, std::byte* storage, std::int32_t layer,
                                  std::int32_t head_dim) {
  const std::int64_t slot_stride = std::int64_t{c.num_kv_heads} * head_dim;
  return {.data = storage + layer * elements_per_layer(c, head_dim) * dtype_bytes(c.dtype),
          .page_stride = c.page_size * slot_stride,
          .slot_stride = slot_stride,
          .head_stride = head_dim,
          .dim_stride = 1};
}

/// Copies the first `num_slots` slots of a page, in one layer. Pages are dense, so it is one run of
/// bytes.
void copy_slots(const kernels::PagedTensor& tensor, DType dtype, const PageCopy& copy) {
  const std::int64_t element = dtype_bytes(dtype);
  auto* bytes = static_cast<std::byte*>(tensor.data);
  std::memcpy(bytes + copy.destination * tensor.page_stride * element,
              bytes + copy.source * tensor.page_stride * element,
              static_cast<std::size_t>(copy.num_slots * tensor.slot_stride * element));
}

}  // namespace

CacheImpl::CacheImpl(const CacheConfig& checked_config)
    : config(checked_config),
      store(store_config(config)),
      keys(storage_bytes(config, config.head_dim), "keys"),
      values(storage_bytes(config, config.head_dim_v), "values"),
      begun_table(std::make_unique_for_overwrite<std::int32_t[]>(
          static_cast<std::size_t>(config.max_num_seqs) *
          static_cast<std::size_t>(store.max_pages_per_seq()))) {}

kernels::KvPages CacheImpl::pages_of_layer(std::int32_t layer) const {
  return {.k = layer_tensor(config, keys.data(), layer, config.head_dim),
          .v = layer_tensor(config, values.data(), layer, config.head_dim_v),
          .dtype = config.dtype,
          .num_pages = config.num_pages,
          .page_size = config.page_size};
}

kernels::StepBatch CacheImpl::begun_batch() const {
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
  return {tensor.data, c.dtype, {c.num_pages, c.page_size, c.num_kv_heads, head_dim}, c.device};
}

}  // namespace

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

void KvCache::begin(const StepPlan& plan, Stream /*stream*/) {
  check_own(plan, *impl_);
  if (!impl_->store.can_undo())
    base::throw_mismatch("plan", "one that was not begun", "one that was");
  const detail::PlanData& d = *plan.data();
  for (std::size_t b = 0; b < d.ids.size(); ++b) {
    const auto first = static_cast<std::size_t>(d.entry_offsets[b]);
    const auto count = static_cast<std::size_t>(d.entry_offsets[b + 1]) - first;
    if (count == 0) continue;
    std::int32_t* row =
        impl_->begun_table.get() + std::int64_t{d.rows[b]} * impl_->store.max_pages_per_seq();
    std::memcpy(row + d.first_entries[b], d.entries.data() + first, count * sizeof(std::int32_t));
  }
  for (std::int32_t layer = 0; layer < impl_->config.num_layers && !d.copies.empty(); ++layer) {
    const kernels::KvPages pages = impl_->pages_of_layer(layer);
    for (const PageCopy& copy : d.copies) {
      detail::copy_slots(pages.k, pages.dtype, copy);
      detail::copy_slots(pages.v, pages.dtype, copy);
    }
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
