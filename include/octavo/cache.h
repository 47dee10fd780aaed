// SPDX-License-Identifier: Apache-2.0
// The key/value cache: contiguous or paged, many sequences, several layers.
#pragma once

#include <octavo/export.h>
#include <octavo/plan.h>
#include <octavo/tensor.h>
#include <octavo/types.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

namespace octavo {

namespace detail {
struct CacheImpl;
}

/// Sizes of a cache. All of them are fixed for its life.
struct CacheConfig {
  CacheKind kind = CacheKind::Paged;
  std::int32_t num_layers = 1;
  std::int32_t num_kv_heads = 1;
  std::int32_t head_dim = 0;      ///< Of K: 1 … 576.
  std::int32_t head_dim_v = 0;    ///< Of V: 1 … 576; 0 is head_dim.
  DType dtype = DType::F32;       ///< F32, F16 or BF16.
  std::int32_t max_num_seqs = 1;  ///< Live sequences, paused ones included.
  std::int64_t max_seq_len = 0;   ///< Tokens, at most 2^31 - 1.
  std::int32_t page_size =
      16;  ///< Slots of a page, from 1; any number. Contiguous caches ignore it.
  std::int64_t num_pages = 0;  ///< Pages of the pool; 0 is as many as max_num_seqs full sequences
                               ///< need. Contiguous caches ignore it.
  Device device = {};

  /// Memory of the caller's for K and V, both or none, on `device`; it must outlive the cache and
  /// need not be zeroed. Shapes: [num_layers, num_pages, page_size, num_kv_heads, head_dim] and
  /// head_dim_v; contiguous: [num_layers, max_num_seqs, max_seq_len, …]. Strides: any that keep
  /// elements apart, so that head-major and interleaved caches fit.
  TensorView keys = {};
  TensorView values = {};

  /// Workspace of a GPU's cache: memory of the caller's, or null: the cache's own. Bytes: 0 is a
  /// default that holds the products of sequences of max_seq_len, up to 2 GiB of them; see
  /// cache_sizes. A layer call that needs more is refused. On the CPU it grows by itself, and both
  /// stay 0.
  void* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
};

/// What a cache takes, in bytes, before it is made.
struct CacheSizes {
  std::int64_t keys = 0;    ///< Dense, all layers.
  std::int64_t values = 0;  ///< Likewise.
  std::int64_t workspace = 0;
  std::int64_t least_workspace = 0;  ///< Under which a cache is refused.
};

/// Errors: as KvCache's constructor, memory excepted.
[[nodiscard]] OCTAVO_EXPORT CacheSizes cache_sizes(const CacheConfig& config);

/// The cache's use at one moment. Slots are counted once, however many sequences share their page.
struct CacheStats {
  std::int64_t num_seqs = 0;
  std::int64_t num_tokens = 0;  ///< Sum of the lengths of all live sequences.
  std::int64_t pages_total = 0;
  std::int64_t pages_used = 0;
  std::int64_t pages_free = 0;
  std::int64_t pages_shared = 0;  ///< Used pages that more than one sequence holds.
  std::int64_t slots_used = 0;    ///< Slots of used pages.
  std::int64_t slots_wasted = 0;  ///< Slots of used pages that hold no token.
  std::int64_t bytes = 0;         ///< Storage of K and V, all layers; 0 for the caller's memory.
};

/// Keys and values of many growing sequences.
///
/// A step is: `plan`, `begin`, then Attention::forward for each layer. Every successful plan, undo,
/// release, fork and truncate bumps `version()`; a plan may be begun only at its own version, and
/// its layers run until the next begin.
///
/// Thread safety: one thread at a time for a cache; different caches are independent.
class OCTAVO_EXPORT KvCache {
 public:
  /// Makes the cache and its storage, zeroed.
  ///
  /// Errors: InvalidArgument names the field, wanted and got; OutOfMemory; NotCompiled for a device
  /// this build lacks; DeviceFailure when there is no GPU or its driver is too old. On a GPU all
  /// memory is taken here: later calls take none.
  explicit KvCache(const CacheConfig& config);
  ~KvCache();
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;

  /// Takes the slots that a step needs, for all layers, or nothing at all.
  ///
  /// Batch order is the order given. An unknown id starts a sequence; one that is not listed pauses
  /// and keeps its tokens. When pages, sequences or max_seq_len don't suffice, the outcome says
  /// what was missing and the cache is exactly as before.
  ///
  /// Errors: InvalidArgument for a repeated id, a negative count, or a count that max_seq_len alone
  /// rules out. Cost: O(sequences listed + pages taken + entries listed); no allocation in steady
  /// state.
  [[nodiscard]] PlanOutcome plan(std::span<const SequenceStep> step);
  [[nodiscard]] PlanOutcome plan(std::initializer_list<SequenceStep> step) {
    return plan(std::span<const SequenceStep>(step.begin(), step.size()));
  }

  /// Takes back the newest plan, as if it had never been made (the version still grows).
  ///
  /// Errors: InvalidArgument when the plan is not this cache's newest change, or was begun or
  /// undone already.
  void undo(const StepPlan& plan);

  /// Makes the plan current: uploads its page-table entries and runs its page copies, in all
  /// layers.
  ///
  /// Errors: InvalidArgument when the cache changed since the plan was made, or the plan is another
  /// cache's, or the stream another device's. Sync: enqueues on `stream`, and waits only when the
  /// device is more than 8 steps behind; on the CPU, done when it returns.
  void begin(const StepPlan& plan, Stream stream = {});

  /// Ends a sequence and gives its pages back. Errors: InvalidArgument for an unknown id.
  void release(SequenceId id);

  /// Cuts a sequence back to its first `length` tokens; at 0 the id stays alive. Pages that no
  /// longer hold a token of it are given back. Errors: InvalidArgument for an unknown id, a
  /// negative length, or one beyond the sequence's.
  void truncate(SequenceId id, std::int64_t length);

  /// Starts `to` with the whole past of `from`. Paged: full and partial pages are shared, and the
  /// first write to a shared page copies it. Contiguous: takes a run of slots now; the next plan
  /// lists the copy of the rows.
  ///
  /// Errors: InvalidArgument when `from` is unknown or `to` is alive. The outcome says when no
  /// sequence is free.
  [[nodiscard]] ForkOutcome fork(SequenceId from, SequenceId to);

  [[nodiscard]] bool contains(SequenceId id) const noexcept;
  /// Tokens of a sequence. Errors: InvalidArgument for an unknown id.
  [[nodiscard]] std::int64_t length(SequenceId id) const;
  /// The pages of a sequence, in order of position. Errors: InvalidArgument for an unknown id.
  [[nodiscard]] std::vector<std::int32_t> page_ids(SequenceId id) const;
  /// All live sequences, ascending.
  [[nodiscard]] std::vector<SequenceId> sequence_ids() const;
  [[nodiscard]] CacheStats stats() const;
  /// As given, with the defaults filled in.
  [[nodiscard]] const CacheConfig& config() const noexcept;
  [[nodiscard]] std::uint64_t version() const noexcept;

  /// The storage of a layer, by its strides and on the cache's device, for tests and for those who
  /// bring their own kernels. Shapes: [num_pages, page_size, num_kv_heads, head_dim]; contiguous:
  /// [max_num_seqs, max_seq_len, …]. Errors: InvalidArgument for a layer out of range.
  [[nodiscard]] TensorView key_storage(std::int32_t layer);
  [[nodiscard]] TensorView value_storage(std::int32_t layer);

  /// Throws Internal when the counts, tables and lists do not agree. O(all pages): for tests and
  /// debugging.
  void audit() const;

  /// For the library's own rooms.
  [[nodiscard]] detail::CacheImpl& impl() noexcept { return *impl_; }
  [[nodiscard]] const detail::CacheImpl& impl() const noexcept { return *impl_; }

 private:
  std::unique_ptr<detail::CacheImpl> impl_;
};

}  // namespace octavo
