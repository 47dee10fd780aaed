// SPDX-License-Identifier: Apache-2.0
// Continuous batching.
#include "examples/generate/scheduler.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "examples/generate/error.h"

namespace generate {
namespace {

std::int64_t signed_size(std::size_t size) { return static_cast<std::int64_t>(size); }

}  // namespace

const char* to_string(FinishReason reason) noexcept {
  switch (reason) {
    case FinishReason::EndOfText:
      return "end of text";
    case FinishReason::Length:
      return "length";
    case FinishReason::CacheFull:
      return "cache full";
  }
  return "";
}

void demand_fit(std::span<const std::vector<TokenId>> prompts, const CacheChoice& choice) {
  const std::int64_t most = max_kept_tokens(choice);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    if (prompts[i].empty()) fail("prompt {}: wanted at least one token, got none", i + 1);
    if (signed_size(prompts[i].size()) > most) {
      fail(
          "prompt {}: wanted at most {} tokens, which is what a sequence may keep in the cache, "
          "got {}",
          i + 1, most, prompts[i].size());
    }
  }
}

Scheduler::Scheduler(Model& model, const SchedulerConfig& config,
                     std::function<bool(TokenId)> ends_text, Listener& listener)
    : model_(model), config_(config), ends_text_(std::move(ends_text)), listener_(listener) {}

void Scheduler::run(std::span<const std::vector<TokenId>> prompts) {
  demand_fit(prompts, model_.choice());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    waiting_.push_back(
        {i, prompts[i], prompts[i].size(), 0, 0, Sampler(config_.temperature, config_.seed, i)});
  }
  while (!waiting_.empty() || !active_.empty()) {
    admit();
    finished_.assign(active_.size(), false);
    std::vector<Part> parts = choose_parts();
    octavo::StepPlan plan;
    if (plan_step(parts, plan)) compute(parts, plan);
    drop_finished();
  }
}

// A sequence starts when the pages for all that it has so far are free beside those that others
// are about to take; it would only wait otherwise, holding pages.
bool Scheduler::has_room_for(const Sequence& sequence) const {
  const octavo::CacheConfig& cache = model_.cache().config();
  if (cache.kind != octavo::CacheKind::Paged || active_.empty()) return true;
  const auto pages = [&](std::size_t tokens) {
    return (signed_size(tokens) + cache.page_size - 1) / cache.page_size;
  };
  std::int64_t wanted = pages(sequence.tokens.size());
  for (const Sequence& other : active_) {
    wanted += std::max<std::int64_t>(pages(other.tokens.size()) - pages(other.cached_len), 0);
  }
  return wanted <= model_.cache().stats().pages_free;
}

void Scheduler::admit() {
  while (active_.size() < config_.batch && !waiting_.empty() && has_room_for(waiting_.front())) {
    active_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
  // One that had been evicted may be older than some that stayed.
  std::sort(active_.begin(), active_.end(),
            [](const Sequence& a, const Sequence& b) { return a.request_idx < b.request_idx; });
}

std::vector<Scheduler::Part> Scheduler::choose_parts() const {
  std::vector<Part> parts;
  auto budget = static_cast<std::size_t>(config_.chunk);
  for (std::size_t i = 0; i < active_.size(); ++i) {
    const Sequence& sequence = active_[i];
    const bool generates =
        sequence.missing_len() == 1 && sequence.cached_len >= sequence.prompt_len;
    const std::size_t new_tokens = generates ? 1 : std::min(sequence.missing_len(), budget);
    if (!generates) budget -= new_tokens;
    if (new_tokens > 0) parts.push_back({i, new_tokens});
  }
  return parts;
}

// False when no step came about, but something else moved: a sequence gave back its pages or ended.
bool Scheduler::plan_step(std::vector<Part>& parts, octavo::StepPlan& plan) {
  while (true) {
    std::vector<octavo::SequenceStep> step;
    for (const Part& part : parts) {
      step.push_back({active_[part.active_idx].id(), signed_size(part.new_tokens)});
    }
    const octavo::PlanOutcome outcome = model_.cache().plan(step);
    if (outcome.ok()) {
      plan = outcome.plan();
      return true;
    }
    if (parts.size() > 1) {
      parts.pop_back();
      ++stats_.pauses;
      continue;
    }
    if (!make_room(parts.front().active_idx)) {
      finish(parts.front().active_idx, FinishReason::CacheFull);
    }
    return false;
  }
}

bool Scheduler::make_room(std::size_t keep_active_idx) {
  for (std::size_t i = active_.size(); i-- > 0;) {
    if (i != keep_active_idx && active_[i].cached_len > 0) {
      evict(i);
      return true;
    }
  }
  return false;
}

void Scheduler::evict(std::size_t active_idx) {
  Sequence sequence = std::move(active_[active_idx]);
  active_.erase(active_.begin() + signed_size(active_idx));
  finished_.pop_back();
  model_.cache().release(sequence.id());
  sequence.cached_len = 0;
  ++stats_.evictions;
  const auto place = std::find_if(waiting_.begin(), waiting_.end(), [&](const Sequence& other) {
    return other.request_idx > sequence.request_idx;
  });
  waiting_.insert(place, std::move(sequence));
}

void Scheduler::compute(const std::vector<Part>& parts, const octavo::StepPlan& plan) {
  std::vector<TokenId> tokens;
  std::vector<std::size_t> logit_tokens;
  bool only_generation = true;
  for (const Part& part : parts) {
    const Sequence& sequence = active_[part.active_idx];
    const auto first = sequence.tokens.begin() + signed_size(sequence.cached_len);
    tokens.insert(tokens.end(), first, first + signed_size(part.new_tokens));
    // Logits are of use only behind the last token that is known.
    if (part.new_tokens == sequence.missing_len()) logit_tokens.push_back(tokens.size() - 1);
    only_generation = only_generation && part.new_tokens == 1 &&
                      sequence.cached_len >= sequence.prompt_len &&
                      sequence.cached_len == sequence.computed_len;
  }
  const auto start = std::chrono::steady_clock::now();
  const std::span<const float> logits = model_.step(plan, tokens, logit_tokens);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;

  ++stats_.num_steps;
  if (only_generation) {
    ++stats_.decode_steps;
    stats_.decode_step_tokens += signed_size(tokens.size());
    stats_.decode_seconds += elapsed.count();
    stats_.decode_attention_seconds += model_.attention_seconds();
  } else {
    stats_.prefill_step_tokens += signed_size(tokens.size());
    stats_.prefill_seconds += elapsed.count();
  }
  const octavo::CacheStats use = model_.cache().stats();
  if (use.pages_used >= stats_.peak.pages_used) stats_.peak = use;

  const auto vocab_size = static_cast<std::size_t>(model_.config().vocab_size);
  std::size_t logit_row = 0;
  for (const Part& part : parts) {
    advance(active_[part.active_idx], part.new_tokens);
    if (active_[part.active_idx].missing_len() > 0) continue;
    take_token(part.active_idx, logits.subspan(logit_row * vocab_size,
                                               static_cast<std::size_t>(config_.num_token_ids)));
    ++logit_row;
  }
  listener_.on_step(stats_);
}

void Scheduler::advance(Sequence& sequence, std::size_t new_tokens) {
  const std::size_t before = sequence.cached_len;
  const std::size_t after = before + new_tokens;
  const std::size_t fresh = std::clamp(sequence.computed_len, before, after);
  stats_.recomputed_tokens += signed_size(fresh - before);
  stats_.prompt_tokens += signed_size(std::clamp(sequence.prompt_len, fresh, after) - fresh);
  sequence.cached_len = after;
  sequence.computed_len = std::max(sequence.computed_len, after);
}

void Scheduler::take_token(std::size_t active_idx, std::span<const float> logits) {
  Sequence& sequence = active_[active_idx];
  const TokenId token = sequence.sampler.pick(logits);
  if (ends_text_(token)) {
    finish(active_idx, FinishReason::EndOfText);
    return;
  }
  sequence.tokens.push_back(token);
  ++stats_.generated_tokens;
  listener_.on_token(sequence.request_idx, token);
  const std::int64_t num_generated = signed_size(sequence.tokens.size() - sequence.prompt_len);
  if (num_generated >= config_.max_tokens ||
      signed_size(sequence.tokens.size()) > model_.choice().max_seq_len) {
    finish(active_idx, FinishReason::Length);
  }
}

void Scheduler::finish(std::size_t active_idx, FinishReason reason) {
  const Sequence& sequence = active_[active_idx];
  if (sequence.cached_len > 0) model_.cache().release(sequence.id());
  finished_[active_idx] = true;
  listener_.on_finish(sequence.request_idx, reason);
}

void Scheduler::drop_finished() {
  for (std::size_t i = finished_.size(); i-- > 0;) {
    if (finished_[i]) active_.erase(active_.begin() + signed_size(i));
  }
}

}  // namespace generate
