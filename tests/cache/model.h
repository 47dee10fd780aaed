// SPDX-License-Identifier: Apache-2.0
// A naive model of a cache and a driver that runs the same operations on both. What is compared is
// content: every token has a unique number, kept by the model in one vector for each sequence, and
// by the cache in "storage" that follows its page tables and copies. Used by the property test and
// by the fuzzer.
#pragma once

#include <octavo/plan.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache/sequence_store.h"
#include "plan/plan_data.h"
#include "plan/planner.h"

namespace octavo::cache_model {

inline void require(bool condition, const char* what) {
  if (!condition) throw std::logic_error(what);
}

/// Gives operations their choices: numbers below a bound, from a test generator or a fuzzer's
/// bytes.
struct Choices {
  virtual ~Choices() = default;
  virtual std::uint32_t below(std::uint32_t bound) = 0;
  [[nodiscard]] virtual bool done() const = 0;
};

class Driver {
 public:
  explicit Driver(const cache::StoreConfig& config)
      : config_(config), store_(config), storage_(static_cast<std::size_t>(config.num_pages)) {
    for (auto& page : storage_) page.assign(static_cast<std::size_t>(config.page_size), kEmpty);
  }

  void run(Choices& choices) {
    while (!choices.done()) {
      switch (choices.below(6)) {
        case 0:
        case 1:
        case 2:
          step(choices);
          break;
        case 3:
          fork(choices);
          break;
        case 4:
          truncate(choices);
          break;
        default:
          release(choices);
      }
      store_.audit();
      compare_lengths();
    }
  }

 private:
  static constexpr std::int64_t kEmpty = -1;

  void step(Choices& choices) {
    std::vector<SequenceStep> lines;
    std::map<SequenceId, bool> listed;
    const std::uint32_t num_lines = choices.below(4);
    for (std::uint32_t i = 0; i < num_lines; ++i) {
      const SequenceId id = choices.below(8);
      if (listed[id]) continue;
      listed[id] = true;
      lines.push_back({id, std::min<std::int64_t>(choices.below(9), config_.max_seq_len)});
    }
    const auto before = snapshot();
    const PlanOutcome outcome = planner_.plan(store_, lines);
    if (!outcome.ok()) {
      require(before == snapshot(), "a plan that failed changed the cache");
      check_shortage(lines, outcome.shortage());
      return;
    }
    if (choices.below(4) == 0) {
      store_.undo_reservation();
      require(before == snapshot(), "undo left something changed");
      // The same step must now get the same pages.
      const PlanOutcome again = planner_.plan(store_, lines);
      require(again.ok() && again.plan() == outcome.plan(),
              "a step planned again after undo differs");
      carry_out(again.plan());
      return;
    }
    carry_out(outcome.plan());
  }

  void carry_out(const StepPlan& plan) {
    for (const PageCopy& copy : plan.copies()) {
      for (std::int32_t i = 0; i < copy.num_slots; ++i) {
        storage_[static_cast<std::size_t>(copy.destination)][static_cast<std::size_t>(i)] =
            storage_[static_cast<std::size_t>(copy.source)][static_cast<std::size_t>(i)];
      }
    }
    store_.commit_reservation();
    for (std::int32_t b = 0; b < plan.num_seqs(); ++b) {
      const auto row = static_cast<std::size_t>(b);
      auto& tokens = model_[plan.ids()[row]];
      require(plan.past_lens()[row] == static_cast<std::int32_t>(tokens.size()), "past length");
      const std::int32_t num_new = plan.token_offsets()[row + 1] - plan.token_offsets()[row];
      for (std::int32_t i = 0; i < num_new; ++i) {
        require(plan.position(b, i) == static_cast<std::int32_t>(tokens.size()), "position");
        const std::int64_t slot = plan.slot(b, i);
        const auto page = static_cast<std::size_t>(slot / config_.page_size);
        require(store_.pool().num_owners(static_cast<std::int32_t>(page)) == 1,
                "a write to a shared page");
        storage_[page][static_cast<std::size_t>(slot % config_.page_size)] = next_token_;
        tokens.push_back(next_token_++);
      }
      require(plan.clear_lens()[row] >= 0, "clear length");
      for (std::int32_t i = 0; i < plan.clear_lens()[row]; ++i) {
        const std::int32_t position = plan.kv_lens()[row] + i;
        require(position / config_.page_size == (plan.kv_lens()[row] - 1) / config_.page_size,
                "clears another page");
        slot_at(plan.ids()[row], position) = kEmpty;
      }
      if (num_new > 0) require_clean_tail(plan.ids()[row], plan.kv_lens()[row]);
    }
    compare_contents();
  }

  /// Nothing of former owners is left behind the end: pages here are shorter than a tile.
  void require_clean_tail(SequenceId id, std::int32_t length) {
    for (std::int32_t position = length; position % config_.page_size != 0; ++position) {
      require(slot_at(id, position) == kEmpty, "an old token behind the end");
    }
  }

  std::int64_t& slot_at(SequenceId id, std::int32_t position) {
    const auto pages = store_.pages(id);
    const auto page =
        static_cast<std::size_t>(pages[static_cast<std::size_t>(position / config_.page_size)]);
    return storage_[page][static_cast<std::size_t>(position % config_.page_size)];
  }

  void fork(Choices& choices) {
    const SequenceId from = choices.below(8);
    const SequenceId to = choices.below(8);
    if (!model_.contains(from) || model_.contains(to)) return;
    const auto before = snapshot();
    if (store_.fork(from, to) != nullptr) {
      require(before == snapshot(), "a fork that failed changed the cache");
      require(model_.size() == static_cast<std::size_t>(config_.max_num_seqs),
              "a fork failed with rows free");
      return;
    }
    model_[to] = model_[from];
  }

  void truncate(Choices& choices) {
    const SequenceId id = choices.below(8);
    if (!model_.contains(id)) return;
    const std::uint32_t length = choices.below(static_cast<std::uint32_t>(model_[id].size()) + 1);
    store_.truncate(id, length);
    model_[id].resize(length);
  }

  void release(Choices& choices) {
    const SequenceId id = choices.below(8);
    if (!model_.contains(id)) return;
    store_.release(id);
    model_.erase(id);
  }

  void compare_lengths() const {
    require(store_.num_seqs() == static_cast<std::int32_t>(model_.size()), "number of sequences");
    for (const auto& [id, tokens] : model_) {
      require(store_.length(id) == static_cast<std::int32_t>(tokens.size()), "length");
    }
  }

  void compare_contents() {
    // Contiguous forks hold their past only once the next step has copied it, which has just
    // happened.
    for (const auto& [id, tokens] : model_) {
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        require(slot_at(id, static_cast<std::int32_t>(i)) == tokens[i], "content");
      }
    }
  }

  void check_shortage(const std::vector<SequenceStep>& lines, const Shortage& shortage) const {
    std::int64_t starts = 0;
    bool too_long = false;
    for (const SequenceStep& line : lines) {
      const auto found = model_.find(line.id);
      starts += found == model_.end() ? 1 : 0;
      const std::size_t length = found == model_.end() ? 0 : found->second.size();
      too_long =
          too_long || static_cast<std::int64_t>(length) + line.new_tokens > config_.max_seq_len;
    }
    const bool few_rows = starts > config_.max_num_seqs - static_cast<std::int64_t>(model_.size());
    require(shortage.too_long == too_long, "too_long");
    require((shortage.seqs_wanted > shortage.seqs_free) == few_rows, "sequences short");
    require(too_long || few_rows || shortage.pages_wanted > shortage.pages_free,
            "a shortage of nothing");
    require(shortage.pages_free == store_.pool().num_free(), "pages free");
  }

  /// All that a failed or undone change must leave alone, but the version.
  [[nodiscard]] std::string snapshot() const {
    std::string text;
    for (const SequenceId id : store_.sequence_ids()) {
      text += std::to_string(id) + ":" + std::to_string(store_.length(id));
      for (const std::int32_t page : store_.pages(id)) text += "," + std::to_string(page);
      text += ";";
    }
    text +=
        std::to_string(store_.pool().num_free()) + "/" + std::to_string(store_.pool().num_shared());
    for (const PageCopy& copy : store_.pending_copies()) {
      text += "|" + std::to_string(copy.source) + ">" + std::to_string(copy.destination) + "*" +
              std::to_string(copy.num_slots);
    }
    return text;
  }

  cache::StoreConfig config_;
  cache::SequenceStore store_;
  plan::Planner planner_;
  std::vector<std::vector<std::int64_t>> storage_;
  std::map<SequenceId, std::vector<std::int64_t>> model_;
  std::int64_t next_token_ = 0;
};

}  // namespace octavo::cache_model
