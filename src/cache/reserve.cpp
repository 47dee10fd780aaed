// SPDX-License-Identifier: Apache-2.0
// Reserving a step's slots, all or nothing. The step is first listed: sequences started, shared
// pages that it will write to given up, pages counted. Only when everything suffices are pages
// taken; otherwise the listing is abandoned, last line first, which restores every stack and table
// to what it was.
#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/math.h"
#include "cache/sequence_store.h"

namespace octavo::cache {

void SequenceStore::check_counts(std::span<const SequenceStep> step) const {
  for (std::size_t i = 0; i < step.size(); ++i) {
    if (step[i].new_tokens < 0 || step[i].new_tokens > config_.max_seq_len) {
      base::throw_mismatch(fmt::format("step[{}].new_tokens", i),
                           fmt::format("0 … {} (max_seq_len)", config_.max_seq_len),
                           step[i].new_tokens);
    }
  }
}

void SequenceStore::check_repeats(std::span<const SequenceStep> step) const {
  std::vector<SequenceId> ids;
  for (const SequenceStep& line : step) ids.push_back(line.id);
  std::sort(ids.begin(), ids.end());
  const auto repeated = std::adjacent_find(ids.begin(), ids.end());
  if (repeated != ids.end()) {
    base::throw_mismatch("step", "each sequence once",
                         fmt::format("sequence {} more than once", *repeated));
  }
}

/// The end, as a position, of the stretch of slots that is cleared together with the one before
/// position `len` > 0.
std::int32_t SequenceStore::tile_end(std::int32_t len) const {
  const std::int32_t page_begin = (len - 1) / config_.page_size * config_.page_size;
  const std::int64_t in_page =
      std::int64_t{len - 1 - page_begin} / kClearTile * kClearTile + kClearTile;
  return page_begin + static_cast<std::int32_t>(std::min<std::int64_t>(in_page, config_.page_size));
}

// Decoding asks for one token of every sequence at every step: where no page or tile ends, the
// lines below divide nothing.

/// Fills listing_ and returns the pages that they need.
std::int64_t SequenceStore::list_step(std::span<const SequenceStep> step, Shortage& shortage) {
  ++stamp_;
  std::int64_t pages_needed = 0;
  for (const SequenceStep& line : step) {
    const auto new_tokens = static_cast<std::int32_t>(line.new_tokens);
    std::int32_t row = ids_.find(line.id);
    const bool starts = row == IdMap::kNone;
    if (starts) {
      ++shortage.seqs_wanted;
      if (free_rows_.empty()) {
        pages_needed += base::ceil_div(new_tokens, config_.page_size);
        continue;
      }
      row = start_sequence(line.id);
    }
    Sequence& s = sequence(row);
    if (s.step_stamp == stamp_) {
      abandon(listing_);
      check_repeats(step);
    }
    s.step_stamp = stamp_;
    // Filled in place: copied from a local, each would wait for its own stores.
    Reservation& r = listing_.emplace_back();
    r.row = row;
    r.past_len = s.len;
    r.new_len = s.len;
    r.past_num_pages = s.num_pages;
    r.past_first_dirty = s.first_dirty;
    r.first_entry = s.first_dirty;
    r.past_clean_end = s.clean_end;
    r.started = starts;
    const std::int64_t new_len = std::int64_t{s.len} + new_tokens;
    if (new_len > config_.max_seq_len) {
      if (!shortage.too_long || new_len > shortage.longest_len) {
        shortage.longest_id = line.id;
        shortage.longest_len = new_len;
      }
      shortage.too_long = true;
    } else if (new_tokens > 0) {
      r.new_len = static_cast<std::int32_t>(new_len);
      const std::int64_t room_end = std::int64_t{s.num_pages} * config_.page_size;
      r.first_entry = std::min(s.first_dirty, s.num_pages);
      if (s.len < room_end) {  // the last page has room
        const std::int32_t last = s.num_pages - 1;
        r.first_entry = std::min(r.first_entry, last);
        // Asked of the pool first: of a long batch each table row is a cache miss.
        if (pool_.num_shared() > 0 && pool_.num_owners(table_row(row)[last]) > 1) {
          r.copied_page = table_row(row)[last];
          pool_.drop(r.copied_page);  // seen by the sharers that follow in this step: the last of
                                      // them writes in place
          ++pages_needed;
        }
      }
      if (new_len > room_end)
        pages_needed += base::ceil_div(r.new_len, config_.page_size) - s.num_pages;
    }
  }
  return pages_needed;
}

/// Takes list_step back.
void SequenceStore::abandon(std::vector<Reservation>& lines) {
  for (auto r = lines.rbegin(); r != lines.rend(); ++r) {
    if (r->copied_page >= 0) pool_.share(r->copied_page);
    if (r->started) end_sequence(r->row);
  }
  lines.clear();
}

void SequenceStore::take_pages(Reservation& r) {
  if (r.new_len == r.past_len) return;
  Sequence& s = sequence(r.row);
  std::int32_t* table = table_row(r.row);
  if (r.copied_page >= 0) {
    const std::int32_t last = r.past_num_pages - 1;
    table[last] = pool_.take();
    pending_copies_.push_back({r.copied_page, table[last], r.past_len - last * config_.page_size});
    s.clean_end = r.past_len;
  }
  if (r.new_len > std::int64_t{r.past_num_pages} * config_.page_size) {
    s.num_pages = base::ceil_div(r.new_len, config_.page_size);
    for (std::int32_t i = r.past_num_pages; i < s.num_pages; ++i) table[i] = pool_.take();
  }
  if (r.new_len > s.clean_end) {
    s.clean_end = tile_end(r.new_len);
    r.clear_len = s.clean_end - r.new_len;
  }
  s.len = r.new_len;
  s.first_dirty = r.first_entry;
}

std::unique_ptr<Shortage> SequenceStore::reserve(std::span<const SequenceStep> step) {
  check_counts(step);
  listing_.clear();  // not reservations_, which a step that fails must leave to undo
  Shortage shortage;
  const auto seqs_free = static_cast<std::int64_t>(free_rows_.size());
  const std::int64_t pages_needed = list_step(step, shortage);
  const bool enough_seqs = shortage.seqs_wanted <= seqs_free;
  if (!enough_seqs || shortage.too_long || pages_needed > pool_.num_free()) {
    abandon(listing_);
    if (!enough_seqs) check_repeats(step);
    shortage.seqs_free = seqs_free;
    shortage.max_seq_len = config_.max_seq_len;
    fill_pages_shortage(shortage, pages_needed);
    return std::make_unique<Shortage>(std::move(shortage));
  }
  past_num_copies_ = pending_copies_.size();
  make_room_for_copies(listing_.size());  // before the first change, since it may allocate
  for (Reservation& r : listing_) take_pages(r);
  reservations_.swap(listing_);
  changed(true);
  return nullptr;
}

void SequenceStore::fill_pages_shortage(Shortage& shortage, std::int64_t wanted) const {
  shortage.pages_wanted = wanted;
  shortage.pages_free = pool_.num_free();
  shortage.pages_total = pool_.num_pages();
  if (wanted <= shortage.pages_free) return;
  for (std::size_t i = 0; i < sequences_.size(); ++i) {
    if (!sequences_[i].live) continue;
    PageHolder holder{.id = sequences_[i].id, .num_pages = sequences_[i].num_pages};
    for (const std::int32_t page : pages_of_row(static_cast<std::int32_t>(i))) {
      holder.num_shared_pages += pool_.num_owners(page) > 1 ? 1 : 0;
    }
    shortage.holders.push_back(holder);
  }
  std::sort(shortage.holders.begin(), shortage.holders.end(),
            [](const PageHolder& a, const PageHolder& b) {
              return a.num_pages != b.num_pages ? a.num_pages > b.num_pages : a.id < b.id;
            });
}

void SequenceStore::undo_reservation() {
  OCTAVO_CHECK(can_undo_);
  for (auto r = reservations_.rbegin(); r != reservations_.rend(); ++r) {
    Sequence& s = sequence(r->row);
    std::int32_t* table = table_row(r->row);
    for (std::int32_t i = s.num_pages - 1; i >= r->past_num_pages; --i) pool_.drop(table[i]);
    if (r->copied_page >= 0) {
      std::int32_t& entry = table[r->past_num_pages - 1];
      pool_.drop(entry);
      entry = r->copied_page;
    }
    s.len = r->past_len;
    s.num_pages = r->past_num_pages;
    s.first_dirty = r->past_first_dirty;
    s.clean_end = r->past_clean_end;
  }
  abandon(reservations_);
  pending_copies_.resize(past_num_copies_);
  changed(false);
}

void SequenceStore::commit_reservation() {
  for (const Reservation& r : reservations_)
    sequence(r.row).first_dirty = sequence(r.row).num_pages;
  pending_copies_.clear();
  can_undo_ = false;
}

}  // namespace octavo::cache
