// SPDX-License-Identifier: Apache-2.0
// octavo bench: hands over to bench/, which does the measuring.
#include "cli/commands.h"

#include "bench/bench.h"
#include "testing/input_error.h"

#include <fmt/format.h>

#include <regex>

namespace octavo::cli {

int bench(const BenchOptions& options) {
  octavo::bench::Options measured;
  try {
    if (!options.filter.empty()) measured.filter.emplace(options.filter);
  } catch (const std::regex_error& error) {
    throw testkit::InputError(fmt::format("--filter: wanted a regular expression, got '{}' ({})",
                                          testkit::printable(options.filter), error.what()));
  }
  measured.quick = options.quick;
  measured.num_threads = options.num_threads;
  measured.backend = options.backend;
  measured.json = options.json;
  return octavo::bench::run(measured) ? kOk : kFailed;
}

}  // namespace octavo::cli
