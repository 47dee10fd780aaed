// SPDX-License-Identifier: Apache-2.0
// What one step needs, in integers: made once by KvCache::plan, shared by all layers, never
// changed.
#pragma once

#include <octavo/export.h>
#include <octavo/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace octavo {

namespace detail {
struct PlanData;
}

/// One line of a step: a sequence and how many new tokens it brings (0 is allowed).
struct SequenceStep {
  SequenceId id = 0;
  std::int64_t new_tokens = 0;
};

/// The most that a step may hold: what a call is sized by when it is to serve other steps too, as
/// in a captured graph.
struct StepMaxima {
  std::int32_t num_seqs = 0;
  std::int32_t num_tokens = 0;      ///< All new tokens of the step.
  std::int32_t max_new_tokens = 0;  ///< Of one sequence.
  std::int32_t max_kv_len = 0;      ///< Keys of one sequence, new ones included.

  friend bool operator==(const StepMaxima&, const StepMaxima&) = default;
};

/// Rows that a step copies from page to page before its first layer, in all layers, K and V
/// (copy-on-write, forks). Copies are carried out in the order listed.
struct PageCopy {
  std::int32_t source = 0;       ///< Page id.
  std::int32_t destination = 0;  ///< Page id.
  std::int32_t num_slots = 0;    ///< The first so many slots of the page, in tokens.

  friend bool operator==(const PageCopy&, const PageCopy&) = default;
};

/// The plan of a step.
///
/// A handle that is cheap to copy; what it shows never changes. The spans live as long as any copy
/// of the plan. In a contiguous cache a page is the whole run of slots of one sequence. Comparison
/// is by content (which cache and which version do not count).
class OCTAVO_EXPORT StepPlan {
 public:
  StepPlan() noexcept;  ///< An empty plan: no sequence, never begun.
  explicit StepPlan(std::shared_ptr<const detail::PlanData> data) noexcept;
  ~StepPlan();
  StepPlan(const StepPlan&) noexcept;
  StepPlan(StepPlan&&) noexcept;
  StepPlan& operator=(const StepPlan&) noexcept;
  StepPlan& operator=(StepPlan&&) noexcept;

  [[nodiscard]] std::int32_t num_seqs() const noexcept;
  [[nodiscard]] std::int32_t num_tokens() const noexcept;  ///< All new tokens of the step.
  [[nodiscard]] std::int32_t max_new_tokens()
      const noexcept;                                      ///< The most that one sequence brings.
  [[nodiscard]] std::int32_t max_kv_len() const noexcept;  ///< The longest sequence after the step.
  [[nodiscard]] std::int32_t page_size() const noexcept;   ///< Slots.
  [[nodiscard]] std::uint64_t version() const noexcept;    ///< Of the cache that made it.

  [[nodiscard]] std::span<const SequenceId> ids() const noexcept;  ///< [num_seqs], batch order
  [[nodiscard]] std::span<const std::int32_t> rows()
      const noexcept;  ///< [num_seqs], page-table row of each
  [[nodiscard]] std::span<const std::int32_t> token_offsets()
      const noexcept;  ///< [num_seqs + 1], prefix sums
  [[nodiscard]] std::span<const std::int32_t> past_lens()
      const noexcept;  ///< [num_seqs], before the step
  [[nodiscard]] std::span<const std::int32_t> kv_lens()
      const noexcept;  ///< [num_seqs], after the step

  /// Page-table entries that changed or are written to in this step. Sequence b lists
  /// entry_offsets[b + 1] - entry_offsets[b] of them, starting at index first_entries[b] of its
  /// row.
  [[nodiscard]] std::span<const std::int32_t> first_entries() const noexcept;  ///< [num_seqs]
  [[nodiscard]] std::span<const std::int32_t> entry_offsets() const noexcept;  ///< [num_seqs + 1]
  [[nodiscard]] std::span<const std::int32_t> entries() const noexcept;        ///< page ids

  /// Slots behind the sequence's new end that the append clears (newly entered page or tile); 0 for
  /// most. [num_seqs]
  [[nodiscard]] std::span<const std::int32_t> clear_lens() const noexcept;

  [[nodiscard]] std::span<const PageCopy> copies() const noexcept;

  /// The slot, counted over the whole pool (page * page_size + offset), of new token `token_idx` of
  /// batch row `seq_idx`. Errors: InvalidArgument when either is out of range.
  [[nodiscard]] std::int64_t slot(std::int32_t seq_idx, std::int32_t token_idx) const;

  /// The absolute position of that token. Errors: as `slot`.
  [[nodiscard]] std::int32_t position(std::int32_t seq_idx, std::int32_t token_idx) const;

  /// The plan as text: a line for the step and one for each sequence.
  [[nodiscard]] std::string to_string() const;

  friend OCTAVO_EXPORT bool operator==(const StepPlan& a, const StepPlan& b) noexcept;

  /// For the library's own rooms.
  [[nodiscard]] const detail::PlanData* data() const noexcept { return data_.get(); }

 private:
  std::shared_ptr<const detail::PlanData> data_;
};

/// Who holds pages when there are too few.
struct PageHolder {
  SequenceId id = 0;
  std::int64_t num_pages = 0;  ///< All that its table names.
  std::int64_t num_shared_pages =
      0;  ///< Those that some other sequence holds too: releasing this one does not free them.
};

/// What a step or a fork lacked. Several kinds may be short at once; kinds that suffice have wanted
/// <= free.
struct Shortage {
  std::int64_t pages_wanted = 0;  ///< Pages that the step would take.
  std::int64_t pages_free = 0;
  std::int64_t pages_total = 0;  ///< When pages_wanted alone exceeds it, waiting won't help.
  std::int64_t seqs_wanted = 0;  ///< Sequences that would start.
  std::int64_t seqs_free = 0;    ///< max_num_seqs less the live ones, paused ones included.
  bool too_long = false;  ///< A sequence would pass max_seq_len: `longest_id`, to `longest_len`.
  SequenceId longest_id = 0;
  std::int64_t longest_len = 0;  ///< Tokens.
  std::int64_t max_seq_len = 0;  ///< Tokens.
  std::vector<PageHolder>
      holders;  ///< Filled when pages are short: every live sequence, the largest holder first.

  [[nodiscard]] OCTAVO_EXPORT std::string to_string() const;
};

/// A plan, or what is missing for it.
class OCTAVO_EXPORT PlanOutcome {
 public:
  explicit PlanOutcome(StepPlan plan) noexcept : plan_(std::move(plan)) {}
  explicit PlanOutcome(std::unique_ptr<Shortage> shortage) noexcept
      : shortage_(std::move(shortage)) {}

  [[nodiscard]] bool ok() const noexcept { return shortage_ == nullptr; }
  explicit operator bool() const noexcept { return ok(); }

  /// The plan. Errors: InvalidArgument, with the shortage's text, when there is none.
  [[nodiscard]] const StepPlan& plan() const&;
  [[nodiscard]] StepPlan plan() &&;
  /// What is missing. Errors: InvalidArgument when nothing is.
  [[nodiscard]] const Shortage& shortage() const;

 private:
  StepPlan plan_;
  std::unique_ptr<Shortage> shortage_;
};

/// Done, or what is missing for it.
class OCTAVO_EXPORT ForkOutcome {
 public:
  ForkOutcome() noexcept = default;
  explicit ForkOutcome(std::unique_ptr<Shortage> shortage) noexcept
      : shortage_(std::move(shortage)) {}

  [[nodiscard]] bool ok() const noexcept { return shortage_ == nullptr; }
  explicit operator bool() const noexcept { return ok(); }

  /// What is missing. Errors: InvalidArgument when nothing is.
  [[nodiscard]] const Shortage& shortage() const;

 private:
  std::unique_ptr<Shortage> shortage_;
};

}  // namespace octavo
