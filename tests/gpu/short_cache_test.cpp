// SPDX-License-Identifier: Apache-2.0
// Sequences of a caller's cache that have more new tokens than keys, whose first tokens stand at
// negative positions: what the host gives, from every backend.
#include "tests/gpu/callers_twins.h"

#include <octavo/attention.h>
#include <octavo/backend.h>

#include <cstdint>
#include <tuple>

namespace octavo::gpu_tests {
namespace {

/// What sees which keys.
struct Sight {
  Mask mask = Mask::Causal;
  Window window;
};

AttentionConfig attention_of(std::int32_t dim, const Sight& sight) {
  AttentionConfig config;
  config.num_q_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = dim;
  config.mask = sight.mask;
  config.window = sight.window;
  return config;
}

class ShortCache : public GpuTestWith<std::tuple<Backend, Sight>> {};

TEST_P(ShortCache, GivesWhatTheHostGives) {
  const auto& [backend, sight] = GetParam();
  require_backend(backend);
  CallersTwins twins(attention_of(32, sight), DType::F16, 40, {8, 3, 7, 40, 1, 5},
                     {3, 1, 0, 38, 12, 4});
  twins.run_on_host();
  twins.check_on_gpu(backend, true, 4e-3);
}

INSTANTIATE_TEST_SUITE_P(
    Backends, ShortCache,
    ::testing::Combine(::testing::Values(Backend::Unfused, Backend::Flash2),
                       ::testing::Values(Sight{}, Sight{Mask::Full}, Sight{Mask::Full, {-1, 2}},
                                         Sight{Mask::Causal, {3, -1}}, Sight{Mask::Full, {1, 0}})));

/// Most blocks have rows alone that see no key, so that nothing keeps their warps together between
/// the rotated q and the results that take its place; hence many calls.
class RotatedShortCache : public GpuTestWith<std::tuple<Backend, std::int32_t>> {};

TEST_P(RotatedShortCache, GivesWhatTheHostGives) {
  const auto& [backend, dim] = GetParam();
  require_backend(backend);
  CallersTwins twins(attention_of(dim, {}), DType::BF16, 8, {300, 40}, {2, 0});
  const Rope rope;
  twins.rope = &rope;
  twins.run_on_host();
  twins.check_on_gpu(backend, true, 3e-2, 20);
}

INSTANTIATE_TEST_SUITE_P(Backends, RotatedShortCache,
                         ::testing::Combine(::testing::Values(Backend::Unfused, Backend::Flash2),
                                            ::testing::Values(64, 128, 256)));

}  // namespace
}  // namespace octavo::gpu_tests
