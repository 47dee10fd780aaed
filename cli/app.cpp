// SPDX-License-Identifier: Apache-2.0
// The command line of the tool: what may be said, and what help says about it. The one file that
// sees CLI11, which takes seconds to compile.
#include "cli/commands.h"
#include "testing/input_error.h"
#include "testing/spec.h"

#include <octavo/error.h>
#include <octavo/version.h>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <exception>
#include <map>

namespace octavo::cli {

namespace {

constexpr int kMaxInt32 = 2147483647;

std::map<std::string, Backend> backend_names() {
  std::map<std::string, Backend> names;
  for (const Backend backend : {Backend::Auto, Backend::Unfused, Backend::Cpu, Backend::Fused,
                                Backend::Flash2, Backend::Flash3}) {
    names[to_string(backend)] = backend;
  }
  return names;
}

CLI::Option* add_backend(CLI::App& command, Backend& backend) {
  return command.add_option("--backend", backend, "Who computes: auto takes the fastest that can")
      ->transform(CLI::CheckedTransformer(backend_names()).description(""))
      ->type_name("NAME");
}

const std::map<std::string, CacheKind> kKinds = {{"paged", CacheKind::Paged},
                                                 {"contiguous", CacheKind::Contiguous}};

const std::map<std::string, DeviceType> kDevices = {{"cpu", DeviceType::Cpu},
                                                    {"cuda", DeviceType::Cuda}};

void add_info(CLI::App& app, InfoOptions& options) {
  CLI::App* command = app.add_subcommand("info", "Show the machine and the backends it can run");
  command->add_flag("--json", options.json, "One JSON object");
}

void add_check(CLI::App& app, CheckOptions& options) {
  CLI::App* command =
      app.add_subcommand("check", "Replay cases on a backend and compare with their right answers");
  command->add_option("CASE", options.cases, "A case file (.safetensors), or a case in words")
      ->required();
  add_backend(*command, options.backend);
  command->add_option("--device", options.device.type, "Where cache and tensors are: cpu or cuda")
      ->transform(CLI::CheckedTransformer(kDevices).description(""))
      ->type_name("NAME");
  command->add_option("--gpu", options.device.index, "Which GPU, with --device cuda (0)")
      ->check(CLI::Range(0, kMaxInt32));
  command->add_option("--threads", options.num_threads, "Of the CPU; 0: all")
      ->check(CLI::Range(0, 4096));
  command->add_option("--cache", options.kind, "paged or contiguous, instead of the case's")
      ->transform(CLI::CheckedTransformer(kKinds).description(""))
      ->type_name("KIND");
  command->add_option("--page-size", options.page_size, "Instead of the case's")
      ->check(CLI::Range(1, kMaxInt32));
  command->add_flag("--batch-invariant", options.batch_invariant,
                    "Results that don't depend on batch mates");
  command->add_flag("--callers-cache", options.callers_cache,
                    "By the functions for a caller's cache, over the same pages");
  command->add_option("--save", options.save, "Write cases given in words to this folder, as files")
      ->type_name("DIR");
  command->footer(fmt::format(
      "{}\n\n"
      "Prints a line for each case. Exit status: 0 all pass; 1 a result differs or a plan could\n"
      "not be met; 2 a file is unreadable or its description invalid; 3 a case was refused and\n"
      "none failed.\n\n"
      "Examples:\n"
      "  octavo check report.safetensors\n"
      "  octavo check cases/*.safetensors --backend unfused --page-size 3\n"
      "  octavo check \"b3 q1 hq32 hkv8 d128 p16 bf16 seed7\" --backend cpu --threads 2",
      testkit::kSpecHelp));
}

void add_plan(CLI::App& app, PlanOptions& options) {
  CLI::App* command =
      app.add_subcommand("plan", "Show the plans of steps: slots, pages, copies; no model needed");
  command
      ->add_option("WORD", options.words,
                   "ID:TOKENS, release:ID, fork:FROM:TO, truncate:ID:LENGTH; / between steps")
      ->required();
  command->add_option("--cache", options.kind, "paged or contiguous")
      ->transform(CLI::CheckedTransformer(kKinds).description(""))
      ->type_name("KIND");
  command->add_option("--page-size", options.page_size, "Slots of a page (16)")
      ->check(CLI::Range(1, kMaxInt32));
  command->add_option("--num-pages", options.num_pages, "Pages of the pool (64)")
      ->check(CLI::Range(1, kMaxInt32));
  command->add_option("--max-seqs", options.max_num_seqs, "Live sequences at most (64)")
      ->check(CLI::Range(1, kMaxInt32));
  command->add_option("--max-len", options.max_seq_len, "Longest sequence; 0: what the pool holds")
      ->check(CLI::Range(0, kMaxInt32));
  command->add_flag("--json", options.json, "A JSON array, one object for each step");
  command->footer(
      "Exit status: 1 when a step lacks pages, sequences or length; 2 for wrong input.\n\n"
      "Examples:\n"
      "  octavo plan 7:20                        one sequence with a prompt of 20 tokens\n"
      "  octavo plan 7:20 3:1 / 7:1 3:33         two steps\n"
      "  octavo plan 7:20 / fork:7:8 7:1 8:1     copy-on-write: the plan lists the page copy\n"
      "  octavo plan --page-size 4 --num-pages 5 7:16 / 7:1 8:1");
}

void add_bench(CLI::App& app, BenchOptions& options) {
  CLI::App* command = app.add_subcommand(
      "bench", "Measure attention and planning as shares of what this machine can do");
  command->add_option("--filter", options.filter, "Only cases whose name this matches")
      ->type_name("REGEX");
  command->add_flag("--quick", options.quick, "Few, small cases and short measurements");
  command->add_option("--threads", options.num_threads, "0: all")->check(CLI::Range(0, 4096));
  add_backend(*command, options.backend);
  command->add_flag("--json", options.json, "A JSON object on a line for each case");
  command->footer(
      "First measures the DRAM read bandwidth and the peak of fused multiply-adds with the same\n"
      "threads; each case is then a share of the bound that limits it, plans of the speed\n"
      "asked of them: more is better, and can be above 100 %. A decode's bandwidth is measured\n"
      "anew right before and behind it, and the larger of the two taken.\n\n"
      "Examples:\n"
      "  octavo bench --quick\n"
      "  octavo bench --filter \"decode b64 .* bf16\" --json > results.jsonl");
}

int complain(const std::string& what) {
  std::fflush(stdout);
  fmt::print(stderr, "octavo: {}\n", what);
  return kInvalid;
}

}  // namespace

int run(int argc, char** argv) try {
  CLI::App app("Attention over contiguous and paged key/value caches.", "octavo");
  app.set_version_flag("--version", std::string("octavo ") + version());
  app.require_subcommand(1);
  app.footer(
      "octavo COMMAND --help tells more.\n\n"
      "Examples:\n"
      "  octavo info\n"
      "  octavo check report.safetensors --backend cpu\n"
      "  octavo plan --page-size 16 --num-pages 64 7:20 3:1 / 7:1 3:33\n"
      "  octavo bench --quick");
  InfoOptions info_options;
  CheckOptions check_options;
  PlanOptions plan_options;
  BenchOptions bench_options;
  add_info(app, info_options);
  add_check(app, check_options);
  add_plan(app, plan_options);
  add_bench(app, bench_options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // Help and version come this way too.
    if (error.get_exit_code() == 0) return app.exit(error);
    return complain(testkit::printable(error.what()) + " (octavo --help tells more)");
  }
  if (app.got_subcommand("info")) return info(info_options);
  if (app.got_subcommand("check")) return check(check_options);
  if (app.got_subcommand("plan")) return plan(plan_options);
  return bench(bench_options);
} catch (const Error& error) {
  const int status = complain(error.what());
  return error.code() == ErrorCode::Unsupported ? kRefused : status;
} catch (const std::bad_alloc&) {
  return complain("memory: wanted more than there is");
} catch (const std::exception& error) {
  return complain(error.what());
}

}  // namespace octavo::cli
