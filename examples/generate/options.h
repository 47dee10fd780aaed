// SPDX-License-Identifier: Apache-2.0
// The command line of octavo-generate.
#pragma once

#include <octavo/octavo.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "examples/generate/matrix.h"

namespace generate {

struct Options {
  std::vector<std::string> prompts;  ///< Those of the file behind those of the command line.
  std::string model;
  std::int64_t max_tokens = 128;
  double temperature = 0.0;
  std::uint64_t seed = 0;
  bool raw = false;
  WeightType weights = WeightType::F32;
  octavo::CacheKind cache = octavo::CacheKind::Paged;
  octavo::DType cache_type = octavo::DType::F32;
  std::int32_t page_size = 16;
  std::int64_t num_pages = 0;  ///< 0: as many as the batch can need.
  std::int64_t batch = 8;
  std::int64_t chunk = 256;
  octavo::Backend backend = octavo::Backend::Auto;
  octavo::Device device = {};
  int num_threads = 0;  ///< 0 as given; as returned, the number to use.
  bool json = false;
  bool quiet = false;
};

/// The options, or nothing when help was asked for and printed.
///
/// Errors: InvalidArgument for anything the command line, or the file of prompts, gets wrong.
std::optional<Options> parse_options(int argc, const char* const* argv);

/// Where `./dev generate` puts the model.
std::string default_model_path();

}  // namespace generate
