// SPDX-License-Identifier: Apache-2.0
// The sequences of a cache, their lengths and their page tables, and every operation that changes
// them: reserve (a step's slots), undo, release, truncate, fork. Host only, integers only: the
// bytes are moved elsewhere, from what is listed here.
//
// A contiguous cache is one whose pages hold max_seq_len slots and whose forks take their page at
// once.
#pragma once

#include <octavo/plan.h>
#include <octavo/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cache/id_map.h"
#include "cache/page_pool.h"

namespace octavo::cache {

/// Slots behind a sequence's end are cleared in tiles of this many, so that the cost stays with the
/// tokens even where pages are long.
inline constexpr std::int32_t kClearTile = 64;

struct StoreConfig {
  CacheKind kind = CacheKind::Paged;
  std::int32_t max_num_seqs = 0;
  std::int32_t max_seq_len = 0;
  std::int32_t page_size = 0;
  std::int32_t num_pages = 0;
};

/// One line of a reserved step, with what undo needs.
struct Reservation {
  std::int32_t row = 0;
  std::int32_t past_len = 0;
  std::int32_t new_len = 0;
  std::int32_t past_num_pages = 0;
  std::int32_t past_first_dirty =
      0;                         ///< Entries from here on were not yet uploaded before the step.
  std::int32_t first_entry = 0;  ///< Entries from here on are to be uploaded, or are written to.
  std::int32_t clear_len = 0;    ///< Slots behind new_len to clear.
  std::int32_t copied_page =
      -1;  ///< The shared page that the step's first write replaces by a copy, or -1.
  std::int32_t past_clean_end = 0;
  bool started = false;  ///< The step starts the sequence.
};

class SequenceStore {
 public:
  explicit SequenceStore(const StoreConfig& config);

  /// Takes rows and pages for a step, or changes nothing and says what is missing. The reservations
  /// are valid until the next change. Throws InvalidArgument for repeated ids and counts outside 0
  /// … max_seq_len.
  std::unique_ptr<Shortage> reserve(std::span<const SequenceStep> step);
  [[nodiscard]] std::span<const Reservation> reservations() const { return reservations_; }

  /// Takes the newest reservation back. The caller has checked that nothing came after it.
  void undo_reservation();
  /// The reservation's entries and copies have been carried out.
  void commit_reservation();

  void release(SequenceId id);
  void truncate(SequenceId id, std::int64_t length);
  std::unique_ptr<Shortage> fork(SequenceId from, SequenceId to);

  /// Grows with every successful change.
  [[nodiscard]] std::uint64_t version() const { return version_; }
  /// Whether the newest change was a reservation that was neither undone nor committed.
  [[nodiscard]] bool can_undo() const { return can_undo_; }

  /// Copies not yet carried out, in order.
  [[nodiscard]] std::span<const PageCopy> pending_copies() const { return pending_copies_; }

  [[nodiscard]] bool contains(SequenceId id) const { return ids_.find(id) != IdMap::kNone; }
  [[nodiscard]] std::int32_t length(SequenceId id) const;
  [[nodiscard]] std::span<const std::int32_t> pages(SequenceId id) const;
  [[nodiscard]] std::span<const std::int32_t> pages_of_row(std::int32_t row) const {
    return {table_row(row), static_cast<std::size_t>(sequence(row).num_pages)};
  }
  [[nodiscard]] std::vector<SequenceId> sequence_ids() const;
  [[nodiscard]] std::int32_t num_seqs() const {
    return config_.max_num_seqs - static_cast<std::int32_t>(free_rows_.size());
  }
  [[nodiscard]] std::int32_t max_pages_per_seq() const { return max_pages_per_seq_; }
  [[nodiscard]] const StoreConfig& config() const { return config_; }
  [[nodiscard]] const PagePool& pool() const { return pool_; }

  /// Tokens of all sequences, and slots of used pages that hold none. O(live sequences log live
  /// sequences).
  struct Usage {
    std::int64_t num_tokens = 0;
    std::int64_t slots_wasted = 0;
  };
  [[nodiscard]] Usage usage() const;

  /// Throws Internal when counts, tables and lists disagree. O(all pages).
  void audit() const;

 private:
  struct Sequence {
    SequenceId id = 0;
    std::int32_t len = 0;
    std::int32_t num_pages = 0;
    std::int32_t first_dirty = 0;
    // Slots from len to here hold nothing old; what a truncation or a copied page left is not
    // clean.
    std::int32_t clean_end = 0;
    bool live = false;
    std::uint64_t step_stamp = 0;  // of the last reserve that listed it
  };

  [[nodiscard]] std::int32_t require_row(SequenceId id, const char* argument) const;
  [[nodiscard]] Sequence& sequence(std::int32_t row) {
    return sequences_[static_cast<std::size_t>(row)];
  }
  [[nodiscard]] const Sequence& sequence(std::int32_t row) const {
    return sequences_[static_cast<std::size_t>(row)];
  }
  [[nodiscard]] std::int32_t* table_row(std::int32_t row) const {
    return table_.get() + static_cast<std::int64_t>(row) * max_pages_per_seq_;
  }
  std::int32_t start_sequence(SequenceId id);
  void end_sequence(std::int32_t row);
  void check_counts(std::span<const SequenceStep> step) const;
  void check_repeats(std::span<const SequenceStep> step) const;
  std::int64_t list_step(std::span<const SequenceStep> step, Shortage& shortage);
  void abandon(std::vector<Reservation>& lines);
  void take_pages(Reservation& line);
  [[nodiscard]] std::int32_t tile_end(std::int32_t len) const;
  void fill_pages_shortage(Shortage& shortage, std::int64_t wanted) const;
  void make_room_for_copies(std::size_t more);
  void changed(bool undoable);

  StoreConfig config_;
  std::int32_t max_pages_per_seq_;
  PagePool pool_;
  IdMap ids_;
  std::vector<Sequence> sequences_;      // by row
  std::vector<std::int32_t> free_rows_;  // a stack
  std::unique_ptr<std::int32_t[]>
      table_;  // [max_num_seqs, max_pages_per_seq], read up to num_pages only
  std::vector<Reservation> reservations_;  // of the newest step
  std::vector<Reservation> listing_;       // of one that is being reserved
  std::vector<PageCopy> pending_copies_;
  std::size_t past_num_copies_ = 0;  // pending before the newest reservation
  std::uint64_t version_ = 0;
  std::uint64_t stamp_ = 0;
  bool can_undo_ = false;
};

}  // namespace octavo::cache
