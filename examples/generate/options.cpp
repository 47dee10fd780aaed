// SPDX-License-Identifier: Apache-2.0
// Parsing the command line.
#include "examples/generate/options.h"

#include <omp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <iostream>
#include <limits>
#include <utility>

#include "examples/generate/error.h"
#include "examples/generate/utf8.h"

namespace generate {
namespace {

constexpr const char* kModelName = "SmolLM2-135M-Instruct.Q4_1.gguf";

void demand_range(const char* option, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value < least || value > most) {
    fail("{}: wanted {} to {}, got {}", option, least, most, value);
  }
}

// The value of an option that takes one of a few words.
template <typename T>
T choose(const char* option, const std::string& word,
         std::initializer_list<std::pair<const char*, T>> choices) {
  std::string known;
  for (const auto& [name, value] : choices) {
    if (word == name) return value;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  fail("{}: wanted one of {}, got {}", option, known, printable(word));
}

// One prompt a line. Blank lines separate nothing and are passed over.
void read_prompts(const std::string& path, std::vector<std::string>& prompts) {
  std::ifstream file;
  if (path != "-") {
    file.open(path);
    if (!file) fail("--prompts: wanted a readable file, got {}", printable(path));
  }
  std::istream& in = path == "-" ? std::cin : file;
  std::string line;
  const std::size_t before = prompts.size();
  while (std::getline(in, line)) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.find_first_not_of(" \t") != std::string::npos) prompts.push_back(line);
  }
  if (in.bad()) fail("--prompts: wanted a readable file, got {}", printable(path));
  if (prompts.size() == before) {
    fail("--prompts: wanted one prompt a line, got no line with text in {}", printable(path));
  }
}

void check(Options& options) {
  constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();
  demand_range("--max-tokens", options.max_tokens, 1, kMaxInt);
  demand_range("--page-size", options.page_size, 1, kMaxInt);
  demand_range("--pages", options.num_pages, 0, kMaxInt);
  demand_range("--batch", options.batch, 1, 4096);
  demand_range("--chunk", options.chunk, 1, 1 << 20);
  demand_range("--threads", options.num_threads, 0, 1024);
  if (!(options.temperature >= 0.0 && std::isfinite(options.temperature))) {
    fail("--temperature: wanted a number from 0, got {}", options.temperature);
  }
  if (options.prompts.empty()) {
    fail("prompt: wanted at least one, got none (try: octavo-generate \"Name three colours.\")");
  }
  for (std::size_t i = 0; i < options.prompts.size(); ++i) {
    const std::string& prompt = options.prompts[i];
    if (const auto at = find_invalid(prompt)) {
      fail("prompt {}: wanted UTF-8, got byte 0x{:02x} at offset {}", i + 1,
           static_cast<unsigned>(static_cast<unsigned char>(prompt[*at])), *at);
    }
  }
  if (options.num_threads == 0) options.num_threads = omp_get_max_threads();
}

// CLI11 takes a sign and what doesn't fit for another number.
std::uint64_t seed_of(const std::string& word) {
  std::uint64_t seed = 0;
  const char* const end = word.data() + word.size();
  const auto [at, error] = std::from_chars(word.data(), end, seed);
  if (error != std::errc() || at != end) {
    fail("--seed: wanted 0 to {}, got {}", std::numeric_limits<std::uint64_t>::max(),
         printable(word));
  }
  return seed;
}

// Options that are words, as they stand on the command line.
struct Words {
  std::string seed = "0";
  std::string cache = "paged";
  std::string cache_type = "f32";
  std::string weights = "f32";
  std::string backend = "auto";
  std::string device = "cpu";
};

void take_words(const Words& words, Options& options) {
  using octavo::Backend;
  using octavo::CacheKind;
  using octavo::DType;
  options.seed = seed_of(words.seed);
  options.cache = choose<CacheKind>(
      "--cache", words.cache, {{"paged", CacheKind::Paged}, {"contiguous", CacheKind::Contiguous}});
  options.cache_type =
      choose<DType>("--cache-type", words.cache_type,
                    {{"f32", DType::F32}, {"f16", DType::F16}, {"bf16", DType::BF16}});
  options.weights = choose<WeightType>("--weights", words.weights,
                                       {{"f32", WeightType::F32}, {"bf16", WeightType::Bf16}});
  options.backend = choose<Backend>(
      "--backend", words.backend,
      {{"auto", Backend::Auto}, {"cpu", Backend::Cpu}, {"unfused", Backend::Unfused}});
  options.device.type = choose<octavo::DeviceType>(
      "--device", words.device,
      {{"cpu", octavo::DeviceType::Cpu}, {"cuda", octavo::DeviceType::Cuda}});
}

constexpr const char* kAbout =
    "Answers prompts with a small language model, side by side in one continuous batch over\n"
    "Octavo's key/value cache. Answers go to standard output, progress and figures to standard\n"
    "error.\n\n"
    "Examples:\n"
    "  octavo-generate \"What is the capital of France?\" \"Name three colours.\"\n"
    "  octavo-generate --prompts questions.txt --json > answers.json\n"
    "  octavo-generate --raw \"Once upon a time\" --temperature 0.8 --seed 7\n";

}  // namespace

std::string default_model_path() {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  const char* const home = std::getenv("HOME");
  std::string folder = cache != nullptr && *cache != '\0' ? cache : "";
  if (folder.empty()) folder = std::string(home != nullptr ? home : ".") + "/.cache";
  return folder + "/octavo/" + kModelName;
}

std::optional<Options> parse_options(int argc, const char* const* argv) {
  Options options;
  options.model = default_model_path();
  std::string prompts_file;
  Words words;
  CLI::App app(kAbout, "octavo-generate");

  app.add_option("prompt", options.prompts, "What to answer; any number of prompts");
  app.add_option("--prompts", prompts_file,
                 "More prompts from a file, one a line (-: standard input)")
      ->type_name("FILE");
  app.add_option("--model", options.model, "A GGUF file of the Llama architecture")
      ->type_name("FILE")
      ->capture_default_str();

  const char* const answers = "Answers";
  app.add_option("--max-tokens", options.max_tokens, "Longest answer, in tokens")
      ->capture_default_str()
      ->group(answers);
  app.add_option("--temperature", options.temperature,
                 "0 takes the likeliest token each time; higher is more varied")
      ->capture_default_str()
      ->group(answers);
  app.add_option("--seed", words.seed, "Of the draws that a temperature needs")
      ->type_name("UINT")
      ->capture_default_str()
      ->group(answers);
  app.add_flag("--raw", options.raw, "Continue the prompts as they are, without a chat template")
      ->group(answers);

  const char* const cache = "Cache";
  app.add_option("--cache", words.cache, "paged or contiguous")
      ->capture_default_str()
      ->group(cache);
  app.add_option("--cache-type", words.cache_type, "f32, f16 or bf16")
      ->capture_default_str()
      ->group(cache);
  app.add_option("--page-size", options.page_size, "Tokens in a page")
      ->capture_default_str()
      ->group(cache);
  app.add_option("--pages", options.num_pages,
                 "Pages in all; fewer than the batch can need make sequences wait (0: enough)")
      ->capture_default_str()
      ->group(cache);

  const char* const work = "Work";
  app.add_option("--batch", options.batch, "Sequences at once; the others queue")
      ->capture_default_str()
      ->group(work);
  app.add_option("--chunk", options.chunk, "Most prompt tokens in a step")
      ->capture_default_str()
      ->group(work);
  app.add_option("--weights", words.weights,
                 "f32, or bf16: half the memory and the time, a little less exact")
      ->capture_default_str()
      ->group(work);
  app.add_option("--device", words.device, "Where all of it runs: cpu or cuda")
      ->capture_default_str()
      ->group(work);
  app.add_option("--backend", words.backend, "Of the attention: auto, cpu or unfused")
      ->capture_default_str()
      ->group(work);
  app.add_option("--threads", options.num_threads, "0: as many as OpenMP takes")
      ->capture_default_str()
      ->group(work);

  const char* const output = "Output";
  app.add_flag("--json", options.json, "One JSON object on standard output, no streaming")
      ->group(output);
  app.add_flag("--quiet", options.quiet, "Neither progress nor figures")->group(output);

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    const std::string help = app.help();
    std::fwrite(help.data(), 1, help.size(), stdout);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    std::string message = error.what();
    std::replace(message.begin(), message.end(), '\n', ' ');
    fail("command line: {} (--help lists the options)", printable(message));
  }
  take_words(words, options);
  if (!prompts_file.empty()) read_prompts(prompts_file, options.prompts);
  check(options);
  return options;
}

}  // namespace generate
