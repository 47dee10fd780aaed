// SPDX-License-Identifier: Apache-2.0
// Continuous batching: decides which sequences take part in each step and with how many tokens.
//
// Requests wait in a queue until one of `batch` places is free. Prompts enter in chunks beside the
// sequences that already generate. When pages run out, the latest arrivals wait, keeping theirs;
// when that is not enough they give their pages back and are computed again later, from the tokens
// that they have so far. The earliest always moves, so all of them finish, and none loses a token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <vector>

#include "examples/generate/model.h"
#include "examples/generate/sampler.h"
#include "examples/generate/tokenizer.h"

namespace generate {

enum class FinishReason : std::uint8_t {
  EndOfText,  ///< The model said so.
  Length,     ///< max_tokens, or the longest sequence that model and cache allow.
  CacheFull,  ///< Even alone the sequence would need more pages than there are.
};
const char* to_string(FinishReason reason) noexcept;

struct SchedulerConfig {
  std::size_t batch = 8;           ///< Sequences at once.
  std::int64_t chunk = 256;        ///< Prompt tokens in a step, of all sequences together.
  std::int64_t max_tokens = 128;   ///< Of an answer.
  std::int32_t num_token_ids = 0;  ///< Ids from here on are padding of the vocabulary.
  double temperature = 0.0;
  std::uint64_t seed = 0;
};

/// What happened in all steps so far. Steps that hold nothing but one new token for each sequence
/// are generation, all others prefill.
struct RunStats {
  std::int64_t num_steps = 0;
  std::int64_t prompt_tokens = 0;      ///< Computed, those computed again not included.
  std::int64_t recomputed_tokens = 0;  ///< Computed again after their pages were given back.
  std::int64_t generated_tokens = 0;   ///< Ends of text not included.
  std::int64_t prefill_step_tokens = 0;
  double prefill_seconds = 0.0;
  std::int64_t decode_steps = 0;
  std::int64_t decode_step_tokens = 0;
  double decode_seconds = 0.0;
  double decode_attention_seconds = 0.0;
  std::int64_t pauses = 0;     ///< Times that a sequence sat out a step for want of pages.
  std::int64_t evictions = 0;  ///< Times that one gave its pages back.
  octavo::CacheStats peak;     ///< When most pages were used.
};

/// Told about each token as it comes, and about each end.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void on_token(std::size_t request_idx, TokenId token) = 0;
  virtual void on_finish(std::size_t request_idx, FinishReason reason) = 0;
  /// After each step.
  virtual void on_step(const RunStats& stats) = 0;
};

/// Errors: InvalidArgument, naming the prompt by its number, for one that is empty or that such a
/// cache could never keep.
void demand_fit(std::span<const std::vector<TokenId>> prompts, const CacheChoice& choice);

class Scheduler {
 public:
  /// `ends_text` says which tokens end an answer.
  Scheduler(Model& model, const SchedulerConfig& config, std::function<bool(TokenId)> ends_text,
            Listener& listener);

  /// Answers all prompts. Errors: those of `demand_fit`, before anything is computed.
  void run(std::span<const std::vector<TokenId>> prompts);

  [[nodiscard]] const RunStats& stats() const noexcept { return stats_; }

 private:
  struct Sequence {
    std::size_t request_idx = 0;
    std::vector<TokenId> tokens;  // the prompt and what was generated
    std::size_t prompt_len = 0;
    std::size_t cached_len = 0;    // how many of them the cache holds
    std::size_t computed_len = 0;  // how many it has held at most
    Sampler sampler;

    [[nodiscard]] std::size_t missing_len() const noexcept { return tokens.size() - cached_len; }
    [[nodiscard]] octavo::SequenceId id() const noexcept {
      return static_cast<octavo::SequenceId>(request_idx);
    }
  };
  struct Part {
    std::size_t active_idx = 0;
    std::size_t new_tokens = 0;
  };

  void admit();
  [[nodiscard]] bool has_room_for(const Sequence& sequence) const;
  [[nodiscard]] std::vector<Part> choose_parts() const;
  bool plan_step(std::vector<Part>& parts, octavo::StepPlan& plan);
  bool make_room(std::size_t keep_active_idx);
  void evict(std::size_t active_idx);
  void compute(const std::vector<Part>& parts, const octavo::StepPlan& plan);
  void advance(Sequence& sequence, std::size_t new_tokens);
  void take_token(std::size_t active_idx, std::span<const float> logits);
  void finish(std::size_t active_idx, FinishReason reason);
  void drop_finished();

  Model& model_;
  SchedulerConfig config_;
  std::function<bool(TokenId)> ends_text_;
  Listener& listener_;
  std::deque<Sequence> waiting_;  // in order of arrival
  std::vector<Sequence> active_;  // in order of arrival
  std::vector<bool> finished_;    // of active_, during a step
  RunStats stats_;
};

}  // namespace generate
