// SPDX-License-Identifier: Apache-2.0
// octavo info: the machine, and what of Octavo runs on it.
#include "bench/machine.h"
#include "cli/commands.h"

#include <octavo/backend.h>
#include <octavo/version.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <omp.h>

#include <cstdio>
#include <filesystem>
#include <string>

namespace octavo::cli {

namespace {

struct Gpu {
  bool found = false;
  std::string description;
};

// By the files that the driver makes: the tool needs no CUDA to say why there is no GPU.
Gpu look_for_gpu() {
  std::error_code code;
  const std::string driver = bench::first_line("/proc/driver/nvidia/version");
  if (driver.empty()) return {false, "none: no NVIDIA driver is loaded"};
  if (!std::filesystem::exists("/dev/nvidia0", code)) {
    return {false, "none: the NVIDIA driver is loaded, but there is no /dev/nvidia0"};
  }
  return {true, driver};
}

const char* compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

void print_json(const bench::Machine& machine, const Gpu& gpu) {
  nlohmann::json object = {
      {"version", version()},
      {"compiler", compiler()},
      {"cpu",
       {{"model", machine.cpu_model},
        {"simd", cpu_target()},
        {"threads", omp_get_max_threads()},
        {"last_level_cache_bytes", machine.cache_bytes},
        {"memory_bytes", machine.memory_bytes}}},
      {"gpu", {{"found", gpu.found}, {"description", gpu.description}}},
      {"backends", nlohmann::json::array()},
  };
  for (const BackendInfo& backend : backends()) {
    object["backends"].push_back({{"name", to_string(backend.backend)},
                                  {"compiled", backend.compiled},
                                  {"usable", backend.usable},
                                  {"description", backend.description},
                                  {"why_not", backend.why_not}});
  }
  fmt::print("{}\n", object.dump(2));
}

}  // namespace

int info(const InfoOptions& options) {
  const bench::Machine machine = bench::this_machine();
  const Gpu gpu = look_for_gpu();
  if (options.json) {
    print_json(machine, gpu);
    return kOk;
  }
  constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
  fmt::print("octavo    {} ({})\n", version(), compiler());
  fmt::print("cpu       {}, {}, {} threads\n", machine.cpu_model, cpu_target(),
             omp_get_max_threads());
  fmt::print("memory    {:.1f} GiB, last-level cache {:.1f} MiB\n",
             static_cast<double>(machine.memory_bytes) / kGib,
             static_cast<double>(machine.cache_bytes) / kGib * 1024.0);
  fmt::print("gpu       {}\n", gpu.description);
  fmt::print("backends\n");
  for (const BackendInfo& backend : backends()) {
    const char* state = backend.usable ? "usable" : backend.compiled ? "compiled" : "absent";
    fmt::print("  {:<8} {:<8}  {}{}{}\n", to_string(backend.backend), state, backend.description,
               backend.why_not.empty() ? "" : ": ", backend.why_not);
  }
  return kOk;
}

}  // namespace octavo::cli
