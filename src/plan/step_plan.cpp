// SPDX-License-Identifier: Apache-2.0
// What the public plan types show.
#include <octavo/plan.h>

#include <tuple>

#include "base/error.h"
#include "plan/plan_data.h"

namespace octavo {
namespace {

const detail::PlanData& empty_plan() {
  static const detail::PlanData kEmpty = [] {
    detail::PlanData data;
    data.token_offsets = {0};
    data.entry_offsets = {0};
    return data;
  }();
  return kEmpty;
}

const detail::PlanData& content(const detail::PlanData* data) {
  return data != nullptr ? *data : empty_plan();
}

auto compared(const detail::PlanData& d) {
  return std::tie(d.page_size, d.ids, d.rows, d.token_offsets, d.past_lens, d.kv_lens,
                  d.first_entries, d.entry_offsets, d.entries, d.clear_lens, d.copies);
}

}  // namespace

StepPlan::StepPlan() noexcept = default;
StepPlan::StepPlan(std::shared_ptr<const detail::PlanData> data) noexcept
    : data_(std::move(data)) {}
StepPlan::~StepPlan() = default;
StepPlan::StepPlan(const StepPlan&) noexcept = default;
StepPlan::StepPlan(StepPlan&&) noexcept = default;
StepPlan& StepPlan::operator=(const StepPlan&) noexcept = default;
StepPlan& StepPlan::operator=(StepPlan&&) noexcept = default;

std::int32_t StepPlan::num_seqs() const noexcept { return static_cast<std::int32_t>(ids().size()); }
std::int32_t StepPlan::num_tokens() const noexcept { return content(data()).num_tokens; }
std::int32_t StepPlan::max_new_tokens() const noexcept { return content(data()).max_new_tokens; }
std::int32_t StepPlan::max_kv_len() const noexcept { return content(data()).max_kv_len; }
std::int32_t StepPlan::page_size() const noexcept { return content(data()).page_size; }
std::uint64_t StepPlan::version() const noexcept { return content(data()).version; }

std::span<const SequenceId> StepPlan::ids() const noexcept { return content(data()).ids; }
std::span<const std::int32_t> StepPlan::rows() const noexcept { return content(data()).rows; }
std::span<const std::int32_t> StepPlan::token_offsets() const noexcept {
  return content(data()).token_offsets;
}
std::span<const std::int32_t> StepPlan::past_lens() const noexcept {
  return content(data()).past_lens;
}
std::span<const std::int32_t> StepPlan::kv_lens() const noexcept { return content(data()).kv_lens; }
std::span<const std::int32_t> StepPlan::first_entries() const noexcept {
  return content(data()).first_entries;
}
std::span<const std::int32_t> StepPlan::entry_offsets() const noexcept {
  return content(data()).entry_offsets;
}
std::span<const std::int32_t> StepPlan::entries() const noexcept { return content(data()).entries; }
std::span<const std::int32_t> StepPlan::clear_lens() const noexcept {
  return content(data()).clear_lens;
}
std::span<const PageCopy> StepPlan::copies() const noexcept { return content(data()).copies; }

std::int32_t StepPlan::position(std::int32_t seq_idx, std::int32_t token_idx) const {
  const detail::PlanData& d = content(data());
  if (seq_idx < 0 || seq_idx >= num_seqs()) {
    base::throw_mismatch("seq_idx", fmt::format("0 … {}", num_seqs() - 1), seq_idx);
  }
  const auto b = static_cast<std::size_t>(seq_idx);
  const std::int32_t new_tokens = d.token_offsets[b + 1] - d.token_offsets[b];
  if (token_idx < 0 || token_idx >= new_tokens) {
    base::throw_mismatch("token_idx", fmt::format("0 … {}", new_tokens - 1), token_idx);
  }
  return d.past_lens[b] + token_idx;
}

std::int64_t StepPlan::slot(std::int32_t seq_idx, std::int32_t token_idx) const {
  const std::int32_t at = position(seq_idx, token_idx);
  const detail::PlanData& d = content(data());
  const auto b = static_cast<std::size_t>(seq_idx);
  const std::int32_t entry = d.entry_offsets[b] + at / d.page_size - d.first_entries[b];
  const std::int64_t page = d.entries[static_cast<std::size_t>(entry)];
  return page * d.page_size + at % d.page_size;
}

std::string StepPlan::to_string() const {
  const detail::PlanData& d = content(data());
  std::string text = fmt::format(
      "step: {} sequences, {} new tokens (at most {}), longest {} tokens, page size {}, version "
      "{}\n",
      d.ids.size(), d.num_tokens, d.max_new_tokens, d.max_kv_len, d.page_size, d.version);
  for (const PageCopy& copy : d.copies) {
    text += fmt::format("  copy page {} to page {}: {} slots\n", copy.source, copy.destination,
                        copy.num_slots);
  }
  for (std::size_t b = 0; b < d.ids.size(); ++b) {
    text +=
        fmt::format("  [{}] sequence {}: row {}, tokens {} … {} of the batch, positions {} … {}", b,
                    d.ids[b], d.rows[b], d.token_offsets[b], d.token_offsets[b + 1] - 1,
                    d.past_lens[b], d.kv_lens[b] - 1);
    if (d.token_offsets[b] == d.token_offsets[b + 1]) {
      text = text.substr(0, text.rfind(':')) +
             fmt::format(": row {}, no new token, length {}", d.rows[b], d.kv_lens[b]);
    }
    if (d.entry_offsets[b] < d.entry_offsets[b + 1]) {
      text += fmt::format(", pages[{}…] =", d.first_entries[b]);
      for (std::int32_t i = d.entry_offsets[b]; i < d.entry_offsets[b + 1]; ++i) {
        text += fmt::format(" {}", d.entries[static_cast<std::size_t>(i)]);
      }
    }
    if (d.clear_lens[b] > 0) text += fmt::format(", clears {} slots", d.clear_lens[b]);
    text += '\n';
  }
  return text;
}

bool operator==(const StepPlan& a, const StepPlan& b) noexcept {
  return a.data_ == b.data_ || compared(content(a.data())) == compared(content(b.data()));
}

std::string Shortage::to_string() const {
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : "; ") + part; };
  if (too_long) {
    add(fmt::format("sequence {}: wanted at most {} tokens (max_seq_len), got {}", longest_id,
                    max_seq_len, longest_len));
  }
  if (seqs_wanted > seqs_free) {
    add(fmt::format("sequences: wanted room for {} more, got {} (release one)", seqs_wanted,
                    seqs_free));
  }
  if (pages_wanted > pages_free) {
    std::string held;
    constexpr std::size_t kShown = 8;
    for (std::size_t i = 0; i < holders.size() && i < kShown; ++i) {
      held += fmt::format("{}sequence {} holds {}", i == 0 ? "" : ", ", holders[i].id,
                          holders[i].num_pages);
      if (holders[i].num_shared_pages > 0)
        held += fmt::format(" ({} shared)", holders[i].num_shared_pages);
    }
    if (holders.size() > kShown) held += fmt::format(", {} more", holders.size() - kShown);
    add(fmt::format("pages: wanted {}, got {} free of {}{}{}", pages_wanted, pages_free,
                    pages_total, held.empty() ? "" : ": ", held));
  }
  return text.empty() ? "nothing is missing" : text;
}

const StepPlan& PlanOutcome::plan() const& {
  if (shortage_ != nullptr) {
    throw Error(ErrorCode::InvalidArgument,
                "plan: wanted a step that fits, got " + shortage_->to_string());
  }
  return plan_;
}

StepPlan PlanOutcome::plan() && { return std::as_const(*this).plan(); }

namespace {

const Shortage& require_shortage(const std::unique_ptr<Shortage>& shortage) {
  if (shortage == nullptr)
    base::throw_mismatch("shortage", "an outcome that failed", "one that succeeded");
  return *shortage;
}

}  // namespace

const Shortage& PlanOutcome::shortage() const { return require_shortage(shortage_); }
const Shortage& ForkOutcome::shortage() const { return require_shortage(shortage_); }

}  // namespace octavo
