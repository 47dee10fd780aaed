// SPDX-License-Identifier: Apache-2.0
// Lookups and single-sequence operations; reserving a step is in reserve.cpp.
#include "cache/sequence_store.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/math.h"

namespace octavo::cache {

SequenceStore::SequenceStore(const StoreConfig& config)
    : config_(config),
      max_pages_per_seq_(base::ceil_div(config.max_seq_len, config.page_size)),
      pool_(config.num_pages),
      ids_(config.max_num_seqs),
      sequences_(static_cast<std::size_t>(config.max_num_seqs)),
      free_rows_(static_cast<std::size_t>(config.max_num_seqs)),
      table_(std::make_unique_for_overwrite<std::int32_t[]>(
          static_cast<std::size_t>(config.max_num_seqs) *
          static_cast<std::size_t>(max_pages_per_seq_))) {
  for (std::size_t i = 0; i < free_rows_.size(); ++i) {
    free_rows_[i] = config.max_num_seqs - 1 - static_cast<std::int32_t>(i);
  }
  reservations_.reserve(free_rows_.size());
  listing_.reserve(free_rows_.size());
  pending_copies_.reserve(free_rows_.size());
}

std::int32_t SequenceStore::require_row(SequenceId id, const char* argument) const {
  const std::int32_t row = ids_.find(id);
  if (row == IdMap::kNone) base::throw_mismatch(argument, "the id of a live sequence", id);
  return row;
}

std::int32_t SequenceStore::length(SequenceId id) const {
  return sequence(require_row(id, "id")).len;
}

std::span<const std::int32_t> SequenceStore::pages(SequenceId id) const {
  return pages_of_row(require_row(id, "id"));
}

std::vector<SequenceId> SequenceStore::sequence_ids() const {
  std::vector<SequenceId> ids;
  for (const Sequence& s : sequences_) {
    if (s.live) ids.push_back(s.id);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

void SequenceStore::changed(bool undoable) {
  ++version_;
  can_undo_ = undoable;
}

std::int32_t SequenceStore::start_sequence(SequenceId id) {
  const std::int32_t row = free_rows_.back();
  free_rows_.pop_back();
  ids_.insert(id, row);
  sequence(row) = Sequence{.id = id, .live = true};
  return row;
}

void SequenceStore::end_sequence(std::int32_t row) {
  ids_.erase(sequence(row).id);
  sequence(row) = Sequence{};
  free_rows_.push_back(row);
}

void SequenceStore::make_room_for_copies(std::size_t more) {
  const std::size_t needed = pending_copies_.size() + more;
  if (needed > pending_copies_.capacity()) pending_copies_.reserve(needed * 2);
}

void SequenceStore::release(SequenceId id) {
  const std::int32_t row = require_row(id, "release: id");
  const auto pages = pages_of_row(row);
  // Last page first, so that a sequence that follows takes them in the same order again.
  for (auto page = pages.rbegin(); page != pages.rend(); ++page) pool_.drop(*page);
  end_sequence(row);
  changed(false);
}

void SequenceStore::truncate(SequenceId id, std::int64_t length) {
  const std::int32_t row = require_row(id, "truncate: id");
  Sequence& s = sequence(row);
  if (length < 0 || length > s.len) {
    base::throw_mismatch("truncate: length",
                         fmt::format("0 … {} (the length of sequence {})", s.len, id), length);
  }
  const auto len = static_cast<std::int32_t>(length);
  const std::int32_t kept = base::ceil_div(len, config_.page_size);
  const std::int32_t* table = table_row(row);
  for (std::int32_t i = s.num_pages - 1; i >= kept; --i) pool_.drop(table[i]);
  if (len < s.len) s.clean_end = len;
  s.len = len;
  s.num_pages = kept;
  s.first_dirty = std::min(s.first_dirty, kept);
  changed(false);
}

std::unique_ptr<Shortage> SequenceStore::fork(SequenceId from, SequenceId to) {
  const std::int32_t source = require_row(from, "fork: from");
  if (contains(to)) base::throw_mismatch("fork: to", "an id that is not alive", to);
  if (free_rows_.empty()) {
    auto shortage = std::make_unique<Shortage>();
    shortage->seqs_wanted = 1;
    shortage->pages_total = pool_.num_pages();
    shortage->pages_free = pool_.num_free();
    shortage->max_seq_len = config_.max_seq_len;
    return shortage;
  }
  make_room_for_copies(1);
  const std::int32_t row = start_sequence(to);
  const Sequence& past = sequence(source);
  Sequence& s = sequence(row);
  s.len = past.len;
  s.num_pages = past.num_pages;
  s.clean_end = s.len;
  std::int32_t* table = table_row(row);
  const std::int32_t* past_table = table_row(source);
  for (std::int32_t i = 0; i < s.num_pages; ++i) {
    if (config_.kind == CacheKind::Contiguous) {
      table[i] = pool_.take();  // there is a page for every row
      pending_copies_.push_back({past_table[i], table[i], s.len});
    } else {
      table[i] = past_table[i];
      pool_.share(table[i]);
    }
  }
  changed(false);
  return nullptr;
}

SequenceStore::Usage SequenceStore::usage() const {
  Usage usage;
  // Partly filled last pages; where sharers filled one to different depths, the deepest counts.
  std::vector<std::pair<std::int32_t, std::int32_t>> tails;
  for (std::size_t row = 0; row < sequences_.size(); ++row) {
    const Sequence& s = sequences_[row];
    usage.num_tokens += s.len;
    if (s.num_pages == 0) continue;
    const std::int32_t last = s.num_pages - 1;
    tails.emplace_back(table_row(static_cast<std::int32_t>(row))[last],
                       s.len - last * config_.page_size);
  }
  std::sort(tails.begin(), tails.end());
  for (std::size_t i = 0; i < tails.size(); ++i) {
    const bool deepest = i + 1 == tails.size() || tails[i + 1].first != tails[i].first;
    if (!deepest) continue;
    // A page that is the last of one sequence may be an earlier, full one of a sharer's.
    std::int32_t num_tail_owners = 0;
    for (std::size_t j = i + 1; j-- > 0 && tails[j].first == tails[i].first;) ++num_tail_owners;
    if (pool_.num_owners(tails[i].first) > num_tail_owners) continue;
    usage.slots_wasted += config_.page_size - tails[i].second;
  }
  return usage;
}

void SequenceStore::audit() const {
  std::vector<std::int32_t> owners(static_cast<std::size_t>(pool_.num_pages()), 0);
  std::int32_t num_live = 0;
  for (std::size_t i = 0; i < sequences_.size(); ++i) {
    const auto row = static_cast<std::int32_t>(i);
    const Sequence& s = sequences_[i];
    if (!s.live) continue;
    ++num_live;
    OCTAVO_CHECK(ids_.find(s.id) == row);
    OCTAVO_CHECK(s.len >= 0 && s.len <= config_.max_seq_len);
    OCTAVO_CHECK(s.num_pages == base::ceil_div(s.len, config_.page_size));
    OCTAVO_CHECK(s.first_dirty >= 0 && s.first_dirty <= s.num_pages);
    for (const std::int32_t page : pages_of_row(row)) {
      OCTAVO_CHECK(page >= 0 && page < pool_.num_pages());
      ++owners[static_cast<std::size_t>(page)];
    }
  }
  OCTAVO_CHECK(num_live == num_seqs());
  std::int32_t num_free = 0;
  std::int32_t num_shared = 0;
  for (std::int32_t page = 0; page < pool_.num_pages(); ++page) {
    const std::int32_t counted = owners[static_cast<std::size_t>(page)];
    OCTAVO_CHECK(counted == pool_.num_owners(page));
    num_free += counted == 0 ? 1 : 0;
    num_shared += counted > 1 ? 1 : 0;
  }
  OCTAVO_CHECK(num_free == pool_.num_free());
  OCTAVO_CHECK(num_shared == pool_.num_shared());
}

}  // namespace octavo::cache
