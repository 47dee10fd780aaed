// SPDX-License-Identifier: Apache-2.0
// The checked-in list of what flash2's kernels take of a multiprocessor: the shared memory that
// launches ask for, and what blocks of all GPUs may have. tools/kernel_resources.py holds the
// compiler to the rest.
#include "kernels/cuda/flash2/config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>

namespace octavo::kernels::flash2 {
namespace {

struct Row {
  int registers = 0;
  int stack = 0;
  int spills = 0;
  int static_smem = 0;
  int dynamic_smem = 0;
};

/// By "source parameters arch".
std::map<std::string, Row> table() {
  std::map<std::string, Row> rows;
  std::ifstream file(OCTAVO_TEST_DATA_DIR "/../resources/flash2.txt");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    std::string source, parameters, arch;
    Row row;
    words >> source >> parameters >> arch >> row.registers >> row.stack >> row.spills >>
        row.static_smem >> row.dynamic_smem;
    EXPECT_FALSE(words.fail()) << line;
    rows[fmt::format("{} {} {}", source, parameters, arch)] = row;
  }
  return rows;
}

template <typename ConfigT>
std::string parameters_of() {
  if constexpr (ConfigT::kWide) {
    return fmt::format("{},{},{},{}", ConfigT::kRowTiles, ConfigT::kWarps, ConfigT::kKeys,
                       ConfigT::kStages);
  } else {
    return fmt::format("{},{},{},{},{},{},{}", ConfigT::kDim, ConfigT::kWarps, ConfigT::kRowTiles,
                       ConfigT::kKeys, ConfigT::kStages, ConfigT::kBlocks,
                       static_cast<int>(ConfigT::kFew));
  }
}

/// Every block of the instance fits one with block_kb of shared memory, and as many as it is made
/// for fit a multiprocessor's registers.
template <typename ConfigT>
void expect_fits(const char* source, int block_kb) {
  constexpr int kRegisters = 65536;  // of a multiprocessor
  const auto rows = table();
  for (const char* arch : {"sm_80", "sm_90"}) {
    const auto found = rows.find(fmt::format("{} {} {}", source, parameters_of<ConfigT>(), arch));
    ASSERT_NE(found, rows.end()) << source << " " << parameters_of<ConfigT>() << " " << arch;
    const Row& row = found->second;
    EXPECT_EQ(row.dynamic_smem, ConfigT::kSmemBytes) << found->first;
    EXPECT_LE(row.static_smem, static_cast<int>(kStateBytes)) << found->first;
    EXPECT_LE(row.static_smem + row.dynamic_smem, block_kb * 1024) << found->first;
    EXPECT_LE(row.registers * ConfigT::kThreads * ConfigT::kBlocks, kRegisters) << found->first;
  }
}

TEST(Flash2Resources, FitTheGpusThatInstancesAreFor) {
  expect_fits<Head64>("attend_64", 99);
  expect_fits<Head128>("attend_128", 99);
  expect_fits<Head256>("attend_256", 227);
  expect_fits<Head256Small>("attend_256_small", 99);
  expect_fits<Few64<1>>("attend_few_64", 99);
  expect_fits<Few64<2>>("attend_few_64", 99);
  expect_fits<Few128<1>>("attend_few_128", 99);
  expect_fits<Few128<2>>("attend_few_128", 99);
  expect_fits<Few256<1>>("attend_few_256", 99);
  expect_fits<Few256<2>>("attend_few_256", 99);
  expect_fits<Wide>("attend_wide", 227);
  expect_fits<WideMedium>("attend_wide_medium", 163);
  expect_fits<WideSmall>("attend_wide_small", 99);
}

TEST(Flash2Resources, KeepNothingInLocalMemory) {
  for (const auto& [name, row] : table()) {
    EXPECT_EQ(row.stack, 0) << name;
    EXPECT_EQ(row.spills, 0) << name;
  }
}

}  // namespace
}  // namespace octavo::kernels::flash2
