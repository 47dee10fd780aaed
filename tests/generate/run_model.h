// SPDX-License-Identifier: Apache-2.0
// Runs prompts through model and scheduler without the program around them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "examples/generate/scheduler.h"

namespace generate::testing {

/// What must not change the answers.
struct Setting {
  octavo::CacheKind kind = octavo::CacheKind::Paged;
  octavo::Backend backend = octavo::Backend::Cpu;
  std::int32_t page_size = 16;
  std::int64_t num_pages = 0;  // 0: enough
  std::size_t batch = 8;
  std::int64_t chunk = 256;
  int num_threads = 2;
  octavo::Device device = {};
};

inline std::string describe(const Setting& setting) {
  return std::string(octavo::to_string(setting.kind)) + " " + octavo::to_string(setting.backend) +
         " page_size " + std::to_string(setting.page_size) + " num_pages " +
         std::to_string(setting.num_pages) + " batch " + std::to_string(setting.batch) + " chunk " +
         std::to_string(setting.chunk) + " threads " + std::to_string(setting.num_threads) +
         " on " + octavo::to_string(setting.device.type);
}

inline void PrintTo(const Setting& setting, std::ostream* out) { *out << describe(setting); }

struct Outcome {
  std::vector<std::vector<TokenId>> tokens;
  std::vector<FinishReason> reasons;
  RunStats stats;
};

class Recorder : public Listener {
 public:
  Recorder(Outcome& outcome, std::size_t count) : outcome_(outcome) {
    outcome_.tokens.resize(count);
    outcome_.reasons.resize(count);
  }
  void on_token(std::size_t request_idx, TokenId token) override {
    outcome_.tokens[request_idx].push_back(token);
  }
  void on_finish(std::size_t request_idx, FinishReason reason) override {
    outcome_.reasons[request_idx] = reason;
  }
  void on_step(const RunStats&) override {}

 private:
  Outcome& outcome_;
};

struct Job {
  std::vector<std::vector<TokenId>> prompts;
  std::int64_t max_tokens = 24;
  std::int64_t max_seq_len = 128;
  std::int32_t num_token_ids = 0;
  std::vector<TokenId> ends;
  double temperature = 0.0;
  std::uint64_t seed = 0;
};

inline Outcome run_job(const Weights& weights, const Job& job, const Setting& setting) {
  CacheChoice choice;
  choice.kind = setting.kind;
  choice.backend = setting.backend;
  choice.device = setting.device;
  choice.page_size = setting.page_size;
  choice.max_num_seqs = static_cast<std::int32_t>(setting.batch);
  choice.max_seq_len = job.max_seq_len;
  choice.num_pages = setting.num_pages;
  if (choice.num_pages == 0) {
    choice.num_pages =
        (job.max_seq_len + setting.page_size - 1) / setting.page_size * choice.max_num_seqs;
  }
  Model model(weights, choice, setting.num_threads);
  SchedulerConfig config;
  config.batch = setting.batch;
  config.chunk = setting.chunk;
  config.max_tokens = job.max_tokens;
  config.num_token_ids = job.num_token_ids;
  config.temperature = job.temperature;
  config.seed = job.seed;
  Outcome outcome;
  Recorder recorder(outcome, job.prompts.size());
  const auto ends_text = [&job](TokenId token) {
    return std::find(job.ends.begin(), job.ends.end(), token) != job.ends.end();
  };
  Scheduler scheduler(model, config, ends_text, recorder);
  scheduler.run(job.prompts);
  outcome.stats = scheduler.stats();
  return outcome;
}

}  // namespace generate::testing
