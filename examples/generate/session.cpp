// SPDX-License-Identifier: Apache-2.0
// Loading, generating, printing.
#include "examples/generate/session.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "examples/generate/chat.h"
#include "examples/generate/error.h"
#include "examples/generate/memory.h"
#include "examples/generate/model.h"
#include "examples/generate/report.h"
#include "examples/generate/scheduler.h"
#include "examples/generate/screen.h"
#include "examples/generate/utf8.h"

namespace generate {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Collects answers and lets the first unfinished one stream; those behind it are printed as soon as
// it is their turn.
class AnswerPrinter : public Listener {
 public:
  AnswerPrinter(std::vector<Answer>& answers, const Tokenizer& tokenizer, const Options& options,
                Screen& screen)
      : answers_(answers),
        tokenizer_(tokenizer),
        options_(options),
        screen_(screen),
        streams_(answers.size()),
        finished_(answers.size()) {}

  void on_token(std::size_t request_idx, TokenId token) override {
    answers_[request_idx].tokens.push_back(token);
    add_text(request_idx, streams_[request_idx].push(tokenizer_.bytes(token)));
  }

  void on_finish(std::size_t request_idx, FinishReason reason) override {
    answers_[request_idx].reason = reason;
    add_text(request_idx, streams_[request_idx].finish());
    finished_[request_idx] = true;
    ++num_finished_;
    while (current_ < answers_.size() && finished_[current_]) {
      if (!options_.json) screen_.write("\n");
      ++current_;
      open_answer();
    }
    if (reason == FinishReason::CacheFull) {
      screen_.note(
          fmt::format("prompt {}: its answer stops here, the cache has no more pages "
                      "(--pages)",
                      request_idx + 1));
    }
  }

  void on_step(const RunStats& stats) override {
    const double answers = static_cast<double>(answers_.size());
    const double shortest = answers * static_cast<double>(options_.max_tokens);
    // Answers that ended early count as full ones, so that the bar ends at the end.
    double done = 0.0;
    for (std::size_t i = 0; i < answers_.size(); ++i) {
      done +=
          static_cast<double>(finished_[i] ? options_.max_tokens : std::ssize(answers_[i].tokens));
    }
    screen_.show_progress("generate", done / shortest,
                          fmt::format("{}/{} answers, {} tokens, {:.1f} tokens/s", num_finished_,
                                      answers_.size(), stats.generated_tokens,
                                      static_cast<double>(stats.generated_tokens) /
                                          std::max(seconds_since(start_), 1e-9)));
  }

 private:
  // The first answer opens when something comes: a prompt may yet be refused.
  void open_first() {
    if (!std::exchange(opened_, true)) open_answer();
  }

  void add_text(std::size_t request_idx, const std::string& text) {
    open_first();
    answers_[request_idx].text += text;
    if (request_idx == current_ && !options_.json && !text.empty()) screen_.write(text);
  }

  void open_answer() {
    if (current_ >= answers_.size() || options_.json) return;
    const Answer& answer = answers_[current_];
    const std::string gap = current_ > 0 ? "\n" : "";
    // Raw prompts are continued, chat prompts answered.
    const std::string head = options_.raw ? answer.prompt : fmt::format("> {}\n", answer.prompt);
    screen_.write(gap + head + answer.text);
  }

  std::vector<Answer>& answers_;
  const Tokenizer& tokenizer_;
  const Options& options_;
  Screen& screen_;
  std::vector<Utf8Stream> streams_;
  std::vector<bool> finished_;
  std::size_t num_finished_ = 0;
  std::size_t current_ = 0;
  bool opened_ = false;
  Clock::time_point start_ = Clock::now();
};

// What a file says without its tensors: enough to refuse a prompt before the weights are loaded.
struct Directory {
  explicit Directory(const Options& options)
      : mapped(options.model),
        file(mapped.bytes(), options.model),
        config(read_config(file)),
        tokenizer(file) {
    if (!options.raw) chat.emplace(file, tokenizer);
    if (tokenizer.num_tokens() > config.vocab_size) {
      fail("{}: tokenizer.ggml.tokens: wanted at most {}, got {}", file.name(), config.vocab_size,
           tokenizer.num_tokens());
    }
  }

  [[nodiscard]] std::vector<TokenId> encode(std::string_view prompt) const {
    return chat ? chat->encode(tokenizer, prompt) : encode_raw(tokenizer, prompt);
  }

  MappedFile mapped;
  Gguf file;
  ModelConfig config;
  Tokenizer tokenizer;
  std::optional<ChatTemplate> chat;
};

CacheChoice choose_cache(const Options& options, const ModelConfig& model,
                         const std::vector<std::vector<TokenId>>& prompts) {
  std::int64_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max<std::int64_t>(longest, std::ssize(prompt));
  CacheChoice choice;
  choice.kind = options.cache;
  choice.dtype = options.cache_type;
  choice.backend = options.backend;
  choice.device = options.device;
  choice.page_size = options.page_size;
  choice.max_num_seqs =
      static_cast<std::int32_t>(std::min<std::int64_t>(options.batch, std::ssize(prompts)));
  choice.max_seq_len = std::min(longest + options.max_tokens, model.context_length);
  const std::int64_t pages_per_seq = (choice.max_seq_len + choice.page_size - 1) / choice.page_size;
  choice.num_pages =
      options.num_pages > 0 ? options.num_pages : pages_per_seq * choice.max_num_seqs;
  demand_fit(prompts, choice);
  if (choice.device.type == octavo::DeviceType::Cpu) {
    demand_memory("cache", cache_bytes(model, choice),
                  "a smaller --batch, --pages or --page-size, or --cache-type f16");
  }
  return choice;
}

Weights load(const Gguf& file, const Options& options, Screen& screen) {
  Weights weights = load_weights(
      file, options.weights, options.num_threads, [&screen](std::size_t done, std::size_t total) {
        screen.show_progress("load", static_cast<double>(done) / static_cast<double>(total),
                             fmt::format("{:.0f} of {:.0f} MB", static_cast<double>(done) / 1e6,
                                         static_cast<double>(total) / 1e6));
      });
  screen.end_progress();
  return weights;
}

}  // namespace

void run_session(const Options& options) {
  Screen screen(options.quiet);
  prepare_blas(options.num_threads);
  std::error_code ignored;
  if (!std::filesystem::exists(options.model, ignored)) {
    fail("--model: wanted a GGUF file, got none at {} (./dev generate fetches one)",
         printable(options.model));
  }
  RunReport report;
  const auto load_start = Clock::now();
  const Directory directory(options);
  std::vector<std::vector<TokenId>> prompts;
  std::vector<Answer> answers;
  for (const std::string& prompt : options.prompts) {
    prompts.push_back(directory.encode(prompt));
    answers.push_back({prompt, prompts.back(), {}, {}, FinishReason::EndOfText});
  }
  const CacheChoice choice = choose_cache(options, directory.config, prompts);
  const Weights weights = load(directory.file, options, screen);
  Model model(weights, choice, options.num_threads);
  report.load_seconds = seconds_since(load_start);
  report.weight_bytes = weights.step_bytes();
  screen.note(fmt::format("loaded {} layers, {:.0f} MB of {} weights, in {:.1f} s",
                          weights.config.num_layers, static_cast<double>(report.weight_bytes) / 1e6,
                          options.weights == WeightType::F32 ? "float32" : "bfloat16",
                          report.load_seconds));

  SchedulerConfig schedule;
  schedule.batch = static_cast<std::size_t>(choice.max_num_seqs);
  schedule.chunk = options.chunk;
  schedule.max_tokens = options.max_tokens;
  schedule.num_token_ids = directory.tokenizer.num_tokens();
  schedule.temperature = options.temperature;
  schedule.seed = options.seed;
  AnswerPrinter printer(answers, directory.tokenizer, options, screen);
  Scheduler scheduler(
      model, schedule, [&](TokenId token) { return directory.tokenizer.ends_text(token); },
      printer);
  const auto start = Clock::now();
  scheduler.run(prompts);
  report.seconds = seconds_since(start);
  screen.end_progress();

  report.run = scheduler.stats();
  report.backend = model.backend_name();
  // The host's bandwidth says nothing about a GPU.
  const bool on_cpu = options.device.type == octavo::DeviceType::Cpu;
  if (on_cpu && (!options.quiet || options.json)) {
    report.weight_bandwidth = weights.measure_bandwidth(options.num_threads);
  }
  if (!options.quiet) screen.note(fmt::format("\n{}", to_text(report, options)));
  if (options.json) screen.write(to_json(answers, report) + "\n");
}

}  // namespace generate
