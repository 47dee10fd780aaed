// SPDX-License-Identifier: Apache-2.0
// octavo check: replays cases and compares.
#include "cli/commands.h"
#include "testing/case_file.h"
#include "testing/input_error.h"
#include "testing/replay.h"
#include "testing/spec.h"

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string_view>

namespace octavo::cli {

namespace {

using testkit::Case;
using testkit::InputError;
using testkit::printable;
using testkit::ReplayResult;
using testkit::Verdict;

// A spec has words and no path; what looks like a path is one, even when nothing is there.
bool is_spec(const std::string& argument) {
  std::error_code code;
  if (std::filesystem::exists(argument, code)) return false;
  return argument.find('/') == std::string::npos &&
         !std::string_view(argument).ends_with(".safetensors");
}

void save_case(const Case& value, const std::string& folder) {
  std::string name = value.name;
  for (char& c : name) {
    if (c == ' ') c = '_';
  }
  const std::filesystem::path path = std::filesystem::path(folder) / (name + ".safetensors");
  const std::vector<std::byte> bytes = testkit::write_case(value);
  std::ofstream stream(path, std::ios::binary);
  stream.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  if (!stream.flush()) {
    throw InputError(fmt::format("--save: wanted a folder to write to, got '{}'", folder));
  }
}

Case load(const std::string& argument, const CheckOptions& options) {
  if (!is_spec(argument)) return testkit::read_case(argument);
  Case value = testkit::make_case(testkit::parse_spec(argument));
  if (!options.save.empty()) save_case(value, options.save);
  return value;
}

void print_line(const std::string& name, const ReplayResult& result) {
  std::string line = fmt::format("{:<8} {}  {}  {} steps", to_string(result.verdict),
                                 printable(name), to_string(result.backend), result.steps);
  const testkit::Comparison& comparison = result.comparison;
  if (comparison.worst.found) {
    line += fmt::format("  max error {:.2e} at {}  rms {:.2e}", comparison.worst.error(),
                        comparison.worst.to_string(), comparison.rms);
  }
  fmt::print("{}\n", line);
}

int status_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::Pass:
      return kOk;
    case Verdict::Invalid:
      return kInvalid;
    case Verdict::Refused:
      return kRefused;
    case Verdict::Differs:
    case Verdict::Unmet:
    case Verdict::Broken:
      break;
  }
  return kFailed;
}

int check_one(const std::string& argument, const CheckOptions& options) {
  ReplayResult result;
  result.backend = options.backend;
  try {
    const Case value = load(argument, options);
    testkit::ReplayOptions replay_options;
    replay_options.backend = options.backend;
    replay_options.device = options.device;
    replay_options.num_threads = options.num_threads;
    replay_options.kind = options.kind;
    replay_options.page_size = options.page_size;
    replay_options.batch_invariant = options.batch_invariant;
    replay_options.callers_cache = options.callers_cache;
    result = testkit::replay(value, replay_options);
  } catch (const InputError& error) {
    result.verdict = Verdict::Invalid;
    result.reason = error.what();
  } catch (const std::bad_alloc&) {
    result.verdict = Verdict::Invalid;
    result.reason = "memory: wanted as much as the case needs, got less";
  }
  print_line(argument, result);
  // The two streams stay in step when both go to one place.
  std::fflush(stdout);
  if (result.verdict != Verdict::Pass) {
    fmt::print(stderr, "octavo check: {}: {}\n", printable(argument), result.reason);
  }
  return status_of(result.verdict);
}

}  // namespace

int check(const CheckOptions& options) {
  bool seen[4] = {};
  for (const std::string& argument : options.cases) seen[check_one(argument, options)] = true;
  for (const int status : {kInvalid, kFailed, kRefused}) {
    if (seen[status]) return status;
  }
  return kOk;
}

}  // namespace octavo::cli
