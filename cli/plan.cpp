// SPDX-License-Identifier: Apache-2.0
// octavo plan: shows what a step's plan holds, without any model. The cache has one head of one
// element: plans don't depend on either.
#include "cli/commands.h"
#include "testing/input_error.h"

#include <octavo/cache.h>
#include <octavo/error.h>
#include <octavo/plan.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <charconv>
#include <cstdio>
#include <span>
#include <string_view>
#include <system_error>
#include <vector>

namespace octavo::cli {

namespace {

using Json = nlohmann::json;
using testkit::InputError;
using testkit::printable;

std::vector<std::string_view> split(std::string_view word) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t colon = word.find(':');
    parts.push_back(word.substr(0, colon));
    if (colon == std::string_view::npos) return parts;
    word.remove_prefix(colon + 1);
  }
}

std::int64_t number(std::string_view digits, std::string_view word) {
  std::int64_t value = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, code] = std::from_chars(digits.data(), end, value);
  if (code != std::errc() || stop != end) {
    throw InputError(
        fmt::format("'{}': wanted an integer, got '{}'", printable(word), printable(digits)));
  }
  return value;
}

// A step that lacks something ends the command with kFailed.
struct Unmet {
  std::string what;
};

class Planner {
 public:
  explicit Planner(const PlanOptions& options) : options_(options), cache_(config(options)) {}

  void run() {
    for (const std::string& word : options_.words) {
      if (word == "/") {
        finish_step();
      } else {
        take(word);
      }
    }
    finish_step();
    if (options_.json) fmt::print("{}\n", steps_.dump(2));
  }

 private:
  static CacheConfig config(const PlanOptions& options) {
    CacheConfig config;
    config.kind = options.kind;
    config.head_dim = 1;
    config.dtype = DType::F16;
    config.max_num_seqs = options.max_num_seqs;
    config.page_size = options.page_size;
    config.num_pages = options.num_pages;
    config.max_seq_len = options.max_seq_len != 0
                             ? options.max_seq_len
                             : options.num_pages * std::int64_t{options.page_size};
    return config;
  }

  void take(const std::string& word) {
    const std::vector<std::string_view> parts = split(word);
    if (parts.front() == "release" && parts.size() == 2) {
      cache_.release(number(parts[1], word));
    } else if (parts.front() == "fork" && parts.size() == 3) {
      const ForkOutcome outcome = cache_.fork(number(parts[1], word), number(parts[2], word));
      if (!outcome) throw Unmet{fmt::format("{}: {}", word, outcome.shortage().to_string())};
    } else if (parts.front() == "truncate" && parts.size() == 3) {
      cache_.truncate(number(parts[1], word), number(parts[2], word));
    } else if (parts.size() == 2) {
      step_.push_back({number(parts[0], word), number(parts[1], word)});
    } else {
      throw InputError(
          fmt::format("'{}': wanted ID:TOKENS, release:ID, fork:FROM:TO, truncate:ID:LENGTH or /",
                      printable(word)));
    }
  }

  void finish_step() {
    const PlanOutcome outcome = cache_.plan(step_);
    if (!outcome) {
      throw Unmet{fmt::format("step {}: {}", num_steps_, outcome.shortage().to_string())};
    }
    const StepPlan& plan = outcome.plan();
    cache_.begin(plan);
    if (options_.json) {
      steps_.push_back(as_json(plan));
    } else {
      print(plan);
    }
    step_.clear();
    ++num_steps_;
  }

  void print(const StepPlan& plan) const {
    const CacheStats stats = cache_.stats();
    std::string text = plan.to_string();
    if (text.empty() || text.back() != '\n') text += '\n';
    fmt::print("step {}\n{}", num_steps_, text);
    fmt::print("pages: {} of {} used, {} shared, {} free; slots wasted: {}\n\n", stats.pages_used,
               stats.pages_total, stats.pages_shared, stats.pages_free, stats.slots_wasted);
  }

  Json as_json(const StepPlan& plan) const {
    const auto list = [](const auto& span) {
      Json array = Json::array();
      for (const auto& value : span) array.push_back(value);
      return array;
    };
    Json copies = Json::array();
    for (const PageCopy& copy : plan.copies()) {
      copies.push_back({{"source", copy.source},
                        {"destination", copy.destination},
                        {"num_slots", copy.num_slots}});
    }
    Json slots = Json::array();
    for (std::int32_t seq = 0; seq < plan.num_seqs(); ++seq) {
      const auto b = static_cast<std::size_t>(seq);
      Json row = Json::array();
      const std::int32_t tokens = plan.token_offsets()[b + 1] - plan.token_offsets()[b];
      for (std::int32_t token = 0; token < tokens; ++token) row.push_back(plan.slot(seq, token));
      slots.push_back(std::move(row));
    }
    const CacheStats stats = cache_.stats();
    return {{"ids", list(plan.ids())},
            {"rows", list(plan.rows())},
            {"token_offsets", list(plan.token_offsets())},
            {"past_lens", list(plan.past_lens())},
            {"kv_lens", list(plan.kv_lens())},
            {"first_entries", list(plan.first_entries())},
            {"entry_offsets", list(plan.entry_offsets())},
            {"entries", list(plan.entries())},
            {"clear_lens", list(plan.clear_lens())},
            {"copies", copies},
            {"slots", slots},
            {"stats",
             {{"pages_total", stats.pages_total},
              {"pages_used", stats.pages_used},
              {"pages_free", stats.pages_free},
              {"pages_shared", stats.pages_shared},
              {"slots_wasted", stats.slots_wasted}}}};
  }

  const PlanOptions& options_;
  KvCache cache_;
  std::vector<SequenceStep> step_;
  std::int64_t num_steps_ = 0;
  Json steps_ = Json::array();
};

}  // namespace

int plan(const PlanOptions& options) {
  try {
    Planner(options).run();
    return kOk;
  } catch (const Unmet& unmet) {
    std::fflush(stdout);
    fmt::print(stderr, "octavo plan: {}\n", unmet.what);
    return kFailed;
  }
}

}  // namespace octavo::cli
