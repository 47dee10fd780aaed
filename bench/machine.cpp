// SPDX-License-Identifier: Apache-2.0
#include "bench/machine.h"

#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string_view>

namespace octavo::bench {

namespace {

// The text behind "key … : " in a file of such lines.
std::string value_of(const char* path, std::string_view key) {
  std::ifstream stream(path);
  for (std::string line; std::getline(stream, line);) {
    if (!std::string_view(line).starts_with(key)) continue;
    const std::size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
    if (start != std::string::npos) return line.substr(start);
  }
  return {};
}

// "32768K" and the like.
std::int64_t parse_size(const std::string& text) {
  char* unit = nullptr;
  const std::int64_t number = std::strtoll(text.c_str(), &unit, 10);
  if (*unit == 'K') return number << 10;
  if (*unit == 'M') return number << 20;
  return number;
}

std::int64_t largest_cache() {
  std::int64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    const std::string path = fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/size", index);
    largest = std::max(largest, parse_size(first_line(path.c_str())));
  }
  return largest;
}

}  // namespace

std::string first_line(const char* path) {
  std::ifstream stream(path);
  std::string line;
  std::getline(stream, line);
  return line;
}

Machine this_machine() {
  Machine machine;
  machine.cpu_model = value_of("/proc/cpuinfo", "model name");
  if (machine.cpu_model.empty()) machine.cpu_model = "unknown CPU";
  machine.cache_bytes = largest_cache();
  const std::int64_t page_bytes = sysconf(_SC_PAGESIZE);
  machine.memory_bytes = sysconf(_SC_PHYS_PAGES) * page_bytes;
  machine.available_bytes = parse_size(value_of("/proc/meminfo", "MemAvailable")) << 10;
  if (machine.available_bytes == 0) machine.available_bytes = machine.memory_bytes;
  return machine;
}

}  // namespace octavo::bench
