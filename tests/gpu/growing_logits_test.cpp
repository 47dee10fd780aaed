// SPDX-License-Identifier: Apache-2.0
// Logits that grow along the keys, slowly and in jumps, so that what sums are relative to must
// follow them: what the host gives, from every backend.
#include "tests/gpu/callers_twins.h"

#include <octavo/attention.h>
#include <octavo/backend.h>

#include <cstdint>
#include <tuple>

namespace octavo::gpu_tests {
namespace {

constexpr std::int32_t kHeads = 2;
constexpr std::int32_t kSlots = 700;
constexpr double kLn2 = 0.6931471805599453;

/// The power of two of a key's weight.
enum class Growth { Steady, Slow, Falling, Jumps, LateJump, LateStep, Late5, Late6, Late8, Late9 };
double power_of(Growth growth, std::int32_t key) {
  switch (growth) {
    case Growth::Steady:
      return 0.25 * key;
    case Growth::Slow:
      return key / 64.0;
    case Growth::Falling:
      return 90.0 - 0.125 * key;
    case Growth::Jumps:
      return key / 16 % 2 == 0 ? 0.0 : 8.0 + key / 32 % 3;
    case Growth::LateJump:
      return key == 600 ? 100.0 : -20.0;
    case Growth::LateStep:  // two keys outweigh all others, by less than bases may lag
      return key == 500 ? 7.5 : key == 600 ? 7.3125 : -0.25;
    case Growth::Late5:  // one late key, to both sides of what bases may lag
      return key == 600 ? 5.0 : -0.125 * (key % 7);
    case Growth::Late6:
      return key == 600 ? 6.0 : -0.125 * (key % 7);
    case Growth::Late8:
      return key == 600 ? 8.0 : -0.125 * (key % 7);
    case Growth::Late9:
      return key == 600 ? 9.0 : -0.125 * (key % 7);
  }
  return 0.0;
}

class GrowingLogits : public GpuTestWith<std::tuple<Backend, DType, std::int32_t, Growth>> {};

TEST_P(GrowingLogits, GiveWhatTheHostGives) {
  const auto& [backend, dtype, dim, growth] = GetParam();
  require_backend(backend);
  AttentionConfig config;
  config.num_q_heads = kHeads;
  config.num_kv_heads = kHeads;
  config.head_dim = dim;
  config.softmax_scale = static_cast<float>(kLn2);
  // A long prompt, a short one, drafts, a decode.
  CallersTwins twins(config, dtype, kSlots, {300, 20, 3, 1}, {700, 650, 690, 641});
  // The first dim alone makes the logit: q is 1 there, and 0 in the others.
  for (std::int64_t i = 0; i < twins.q.host.size(); ++i)
    twins.q.host.set(i, i % dim == 0 ? 1.0 : 0.0);
  for (std::int64_t i = 0; i < twins.k.host.size(); i += dim) {
    const auto key = static_cast<std::int32_t>(i / (kHeads * dim) % kSlots);
    twins.k.host.set(i, power_of(growth, key));
  }
  twins.q.gpu.emplace(kGpu, twins.q.host);
  twins.k.gpu.emplace(kGpu, twins.k.host);
  twins.run_on_host();
  // Without the LSE, sums of weights are made in another way.
  const double tolerance = dtype == DType::BF16 ? 2e-2 : 3e-3;
  for (const bool with_lse : {true, false})
    ASSERT_NO_FATAL_FAILURE(twins.check_on_gpu(backend, with_lse, tolerance));
}

INSTANTIATE_TEST_SUITE_P(Backends, GrowingLogits,
                         ::testing::Combine(::testing::Values(Backend::Unfused, Backend::Flash2),
                                            ::testing::Values(DType::F16, DType::BF16),
                                            ::testing::Values(64, 128, 256),
                                            ::testing::Values(Growth::Steady, Growth::Slow,
                                                              Growth::Falling, Growth::Jumps,
                                                              Growth::LateJump, Growth::LateStep,
                                                              Growth::Late5, Growth::Late6,
                                                              Growth::Late8, Growth::Late9)));

}  // namespace
}  // namespace octavo::gpu_tests
