// SPDX-License-Identifier: Apache-2.0
#include "bench/bench.h"

#include "bench/cases.h"
#include "bench/commit.h"
#include "bench/machine.h"
#include "bench/measure.h"
#include "bench/roofline.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <omp.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

namespace octavo::bench {

namespace {

// One line on a terminal, rewritten; a line for each case elsewhere.
void show_progress(std::size_t done, std::size_t total, const std::string& what) {
  const bool terminal = isatty(STDERR_FILENO) != 0;
  fmt::print(stderr, "{}[{}/{}] {}{}", terminal ? "\r\033[K" : "", done, total, what,
             terminal ? "" : "\n");
  std::fflush(stderr);
}

void clear_progress() {
  if (isatty(STDERR_FILENO) != 0) fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
}

void print_text(const BenchCase& value, const Measurement& result) {
  if (!result.skipped.empty()) {
    fmt::print("{:<44} skipped: {}\n", value.name(), result.skipped);
    return;
  }
  const double share = result.bound_seconds / result.seconds;
  std::string rate;
  if (value.kind == CaseKind::Decode) {
    rate = fmt::format("{:>8.1f} GB/s", static_cast<double>(value.bytes()) / result.seconds / 1e9);
  } else if (value.kind == CaseKind::Prefill) {
    rate = fmt::format("{:>8.1f} GFLOP/s", value.flops() / result.seconds / 1e9);
  }
  fmt::print("{:<44} {:>12.1f} us {:<17} {:>6.1f} % of {}\n", value.name(), result.seconds * 1e6,
             rate, share * 100.0, result.bound);
}

void print_json(const BenchCase& value, const Measurement& result, const std::string& device,
                const std::string& date) {
  nlohmann::json line = {
      {"case", value.name()}, {"device", device}, {"driver", nullptr},
      {"commit", kCommit},    {"date", date},
  };
  if (!result.skipped.empty()) {
    line["skipped"] = result.skipped;
  } else {
    line["backend"] = value.is_plan() ? "plan" : to_string(result.backend);
    line["time_us"] = result.seconds * 1e6;
    line["tflops"] = value.is_plan() ? 0.0 : value.flops() / result.seconds / 1e12;
    line["tbps"] =
        value.is_plan() ? 0.0 : static_cast<double>(value.bytes()) / result.seconds / 1e12;
    line["bound"] = result.bound;
    line["bound_share"] = result.bound_seconds / result.seconds;
  }
  fmt::print("{}\n", line.dump());
}

}  // namespace

bool run(const Options& options) {
  std::vector<BenchCase> cases;
  for (const BenchCase& value : all_cases(options.quick)) {
    if (!options.filter || std::regex_search(value.name(), *options.filter)) cases.push_back(value);
  }
  if (cases.empty()) {
    fmt::print(stderr, "octavo bench: wanted a filter that matches a case, got none matched\n");
    return false;
  }
  Conditions conditions;
  conditions.machine = this_machine();
  conditions.num_threads = options.num_threads > 0 ? options.num_threads : omp_get_max_threads();
  conditions.backend = options.backend;
  conditions.quick = options.quick;
  show_progress(0, cases.size(), "measuring this machine's bounds");
  const DramReader dram(conditions.num_threads, conditions.machine.cache_bytes);
  conditions.dram = &dram;
  conditions.read_bytes_per_s = dram.bytes_per_s(kReadingSeconds);
  conditions.flops_per_s = peak_flops_per_s(conditions.num_threads, DType::F32);
  conditions.bf16_flops_per_s = peak_flops_per_s(conditions.num_threads, DType::BF16);
  clear_progress();

  const std::string device =
      fmt::format("{}, {} threads", conditions.machine.cpu_model, conditions.num_threads);
  const std::string date = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  if (!options.json) {
    fmt::print("{}, commit {}, {}\n", device, kCommit, date);
    fmt::print("bounds: DRAM {:.1f} GB/s read, FMA {:.1f} GFLOP/s (f32), {:.1f} (bf16)\n",
               conditions.read_bytes_per_s / 1e9, conditions.flops_per_s / 1e9,
               conditions.bf16_flops_per_s / 1e9);
  }
  bool measured = false;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    show_progress(i + 1, cases.size(), cases[i].name());
    const Measurement result = measure(cases[i], conditions);
    clear_progress();
    measured = measured || result.skipped.empty();
    if (options.json) {
      print_json(cases[i], result, device, date);
    } else {
      print_text(cases[i], result);
    }
    std::fflush(stdout);
  }
  if (!measured) fmt::print(stderr, "octavo bench: no case could be measured\n");
  return measured;
}

}  // namespace octavo::bench
