// SPDX-License-Identifier: Apache-2.0
// Figures of a run.
#include "examples/generate/report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace generate {
namespace {

double rate(std::int64_t count, double seconds) {
  return seconds > 0.0 ? static_cast<double>(count) / seconds : 0.0;
}

double per(double amount, std::int64_t count) {
  return count > 0 ? amount / static_cast<double>(count) : 0.0;
}

// What a step of generation takes at least: it reads every weight once.
double least_step_seconds(const RunReport& report) {
  return report.weight_bandwidth > 0.0
             ? static_cast<double>(report.weight_bytes) / report.weight_bandwidth
             : 0.0;
}

}  // namespace

std::string to_text(const RunReport& report, const Options& options) {
  const RunStats& run = report.run;
  std::string text;
  const auto line = [&text](const char* label, const std::string& rest) {
    text += fmt::format("{:<11} {}\n", label, rest);
  };
  if (run.prefill_step_tokens > 0) {
    line("prefill",
         fmt::format("{} tokens in {:.2f} s, {:.0f} tokens/s", run.prefill_step_tokens,
                     run.prefill_seconds, rate(run.prefill_step_tokens, run.prefill_seconds)));
  }
  if (run.decode_steps > 0) {
    line("decode", fmt::format("{} tokens in {:.2f} s, {:.1f} tokens/s ({} steps of {:.1f} "
                               "sequences on average)",
                               run.decode_step_tokens, run.decode_seconds,
                               rate(run.decode_step_tokens, run.decode_seconds), run.decode_steps,
                               per(static_cast<double>(run.decode_step_tokens), run.decode_steps)));
    const double least = least_step_seconds(report);
    if (least > 0.0) {
      const double step = run.decode_seconds / static_cast<double>(run.decode_steps);
      line("weights", fmt::format("{:.0f} MB read a step, {:.1f} ms at the measured {:.1f} GB/s; a "
                                  "step took {:.1f} ms",
                                  static_cast<double>(report.weight_bytes) / 1e6, least * 1e3,
                                  report.weight_bandwidth / 1e9, step * 1e3));
    }
    line("attention",
         options.device.type == octavo::DeviceType::Cuda
             ? fmt::format("backend {}, on cuda", report.backend)
             : fmt::format("{:.2f} ms a token of decode, backend {}",
                           per(run.decode_attention_seconds * 1e3, run.decode_step_tokens),
                           report.backend));
  }
  const octavo::CacheStats& peak = run.peak;
  const std::string unit = options.cache == octavo::CacheKind::Paged
                               ? fmt::format("pages of {} tokens", options.page_size)
                               : std::string("runs of slots, one a sequence");
  line("cache",
       fmt::format("{}: at its fullest {} of {} used, {} free, {} of {} slots wasted, "
                   "{:.1f} MB in all",
                   unit, peak.pages_used, peak.pages_total, peak.pages_free, peak.slots_wasted,
                   peak.slots_used, static_cast<double>(peak.bytes) / 1e6));
  if (run.pauses > 0 || run.evictions > 0) {
    line("waiting", fmt::format("for pages: {} times a step without a sequence, {} times pages "
                                "given back ({} tokens computed again)",
                                run.pauses, run.evictions, run.recomputed_tokens));
  }
  text.pop_back();
  return text;
}

std::string to_json(const std::vector<Answer>& answers, const RunReport& report) {
  using nlohmann::json;
  json list = json::array();
  json reasons = json::array();
  for (const Answer& answer : answers) {
    list.push_back({{"prompt", answer.prompt},
                    {"prompt_tokens", answer.prompt_tokens},
                    {"tokens", answer.tokens},
                    {"text", answer.text}});
    reasons.push_back(to_string(answer.reason));
  }
  const RunStats& run = report.run;
  const octavo::CacheStats& peak = run.peak;
  const json stats = {
      {"load_seconds", report.load_seconds},
      {"seconds", report.seconds},
      {"steps", run.num_steps},
      {"prompt_tokens", run.prompt_tokens},
      {"recomputed_tokens", run.recomputed_tokens},
      {"generated_tokens", run.generated_tokens},
      {"prefill_tokens_per_second", rate(run.prefill_step_tokens, run.prefill_seconds)},
      {"decode_tokens_per_second", rate(run.decode_step_tokens, run.decode_seconds)},
      {"decode_steps", run.decode_steps},
      {"decode_step_ms", per(run.decode_seconds * 1e3, run.decode_steps)},
      {"attention_ms_per_token", per(run.decode_attention_seconds * 1e3, run.decode_step_tokens)},
      {"weight_bytes_per_step", report.weight_bytes},
      {"weight_bandwidth_bytes_per_second", report.weight_bandwidth},
      {"backend", report.backend},
      {"finish", std::move(reasons)},
      {"pauses", run.pauses},
      {"evictions", run.evictions},
      {"cache",
       {{"bytes", peak.bytes},
        {"pages_total", peak.pages_total},
        {"pages_used_peak", peak.pages_used},
        {"pages_free_at_peak", peak.pages_free},
        {"slots_wasted_at_peak", peak.slots_wasted}}}};
  const json all = {{"answers", std::move(list)}, {"stats", stats}};
  return all.dump();
}

}  // namespace generate
