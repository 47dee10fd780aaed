// SPDX-License-Identifier: Apache-2.0
// What the tool does, a function for each subcommand. app.cpp reads the command line into these
// structs; nothing here knows how it is spelt.
#pragma once

#include <octavo/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace octavo::cli {

/// Exit statuses.
inline constexpr int kOk = 0;
inline constexpr int kFailed = 1;   ///< A result differs, or a plan could not be met.
inline constexpr int kInvalid = 2;  ///< A file or an argument is unreadable or wrong.
inline constexpr int kRefused = 3;  ///< A backend can't run what was asked, and nothing failed.

struct InfoOptions {
  bool json = false;
};

struct CheckOptions {
  std::vector<std::string> cases;  ///< Paths of files, or specs.
  Backend backend = Backend::Auto;
  Device device = {};
  std::int32_t num_threads = 0;
  std::optional<CacheKind> kind;
  std::optional<std::int32_t> page_size;
  bool batch_invariant = false;
  bool callers_cache = false;
  std::string save;  ///< A folder to write the cases of specs to; empty: none.
};

struct PlanOptions {
  std::vector<std::string> words;  ///< Sequences and operations; "/" between steps.
  CacheKind kind = CacheKind::Paged;
  std::int32_t page_size = 16;
  std::int64_t num_pages = 64;
  std::int32_t max_num_seqs = 64;
  std::int64_t max_seq_len = 0;  ///< 0: what the pool holds.
  bool json = false;
};

struct BenchOptions {
  std::string filter;  ///< A regular expression; empty: all.
  bool quick = false;
  std::int32_t num_threads = 0;
  Backend backend = Backend::Auto;
  bool json = false;
};

int info(const InfoOptions& options);
int check(const CheckOptions& options);
int plan(const PlanOptions& options);
int bench(const BenchOptions& options);

/// The whole tool: reads the command line, runs, returns the exit status. Lets no exception out.
int run(int argc, char** argv);

}  // namespace octavo::cli
