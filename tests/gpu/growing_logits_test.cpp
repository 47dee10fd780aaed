// SPDX-License-Identifier: Apache-2.0
// Logits that grow along the keys, slowly and in jumps, so that what sums are relative to must
// follow them: what the host gives, from every backend.
#include "tests/gpu/callers.h"
#include "tests/gpu/twins.h"

#include <octavo/attention.h>
#include <octavo/backend.h>
#include <octavo/workspace.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace octavo::gpu_tests {
namespace {

constexpr std::int32_t kHeads = 2;
constexpr std::int32_t kSlots = 700;
constexpr double kLn2 = 0.6931471805599453;

/// The power of two of a key's weight.
enum class Growth { Steady, Slow, Falling, Jumps, LateJump };
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
  }
  return 0.0;
}

class GrowingLogits : public GpuTestWith<std::tuple<Backend, DType, std::int32_t, Growth>> {};

TEST_P(GrowingLogits, GiveWhatTheHostGives) {
  const auto& [backend, dtype, dim, growth] = GetParam();
  require_backend(backend);
  // A long prompt, a short one, drafts, a decode.
  const std::vector<std::int32_t> new_tokens = {300, 20, 3, 1};
  const std::vector<std::int32_t> kv_lens = {700, 650, 690, 641};
  const auto num_seqs = static_cast<std::int32_t>(kv_lens.size());
  std::vector<std::int32_t> offsets = {0};
  for (const std::int32_t count : new_tokens) offsets.push_back(offsets.back() + count);

  // The first dim alone makes the logit: q is 1 there, and 0 in the others.
  testkit::HostTensor q(dtype, {offsets.back(), kHeads, dim});
  for (std::int64_t i = 0; i < q.size(); ++i) q.set(i, i % dim == 0 ? 1.0 : 0.0);
  TwinTensor k(dtype, {num_seqs, kSlots, kHeads, dim}, 1);
  TwinTensor v(dtype, {num_seqs, kSlots, kHeads, dim}, 2);
  for (std::int64_t i = 0; i < k.host.size(); i += dim) {
    const auto key = static_cast<std::int32_t>(i / (kHeads * dim) % kSlots);
    k.host.set(i, power_of(growth, key));
  }
  k.gpu.emplace(kGpu, k.host);
  const testkit::DeviceTensor gpu_q(kGpu, q);
  testkit::HostTensor wanted(dtype, {offsets.back(), kHeads, dim});
  testkit::HostTensor got(dtype, {offsets.back(), kHeads, dim});
  testkit::HostTensor wanted_lse(DType::F32, {offsets.back(), kHeads});
  testkit::HostTensor got_lse(DType::F32, {offsets.back(), kHeads});
  const testkit::DeviceTensor out(kGpu, got);
  const testkit::DeviceTensor lse(kGpu, got_lse);

  AttentionConfig config;
  config.num_q_heads = kHeads;
  config.num_kv_heads = kHeads;
  config.head_dim = dim;
  config.softmax_scale = static_cast<float>(kLn2);
  KvView view;
  view.k = k.host.view();
  view.v = v.host.view();
  view.num_rows = num_seqs;
  LayerInputs inputs;
  inputs.q = q.view();
  const TensorView wanted_lse_view = wanted_lse.view();
  config.backend = Backend::Unfused;
  attend(config, view, {num_seqs, offsets.back(), offsets.data(), kv_lens.data()}, inputs,
         wanted.view(), &wanted_lse_view);

  DeviceInts gpu_offsets(offsets.size(), 0);
  DeviceInts gpu_lens(kv_lens.size(), 0);
  gpu_offsets.values = offsets;
  gpu_lens.values = kv_lens;
  gpu_offsets.upload();
  gpu_lens.upload();
  view.k = k.gpu->view();
  view.v = v.gpu->view();
  inputs.q = gpu_q.view();
  const TensorView lse_view = lse.view();
  config.backend = backend;
  Workspace workspace(kGpu);
  StepArrays step{num_seqs, offsets.back(), gpu_offsets.get(), gpu_lens.get()};
  step.workspace = &workspace;
  const std::int64_t bytes = workspace.sizes(config, view, step, inputs, out.view()).good;
  const testkit::DeviceMemory memory(kGpu, static_cast<std::size_t>(bytes));
  workspace.use(memory.data(), bytes);
  workspace.plan(view, step);
  attend(config, view, step, inputs, out.view(), &lse_view);
  workspace.check();
  out.download(got);
  lse.download(got_lse);
  const double tolerance = dtype == DType::BF16 ? 2e-2 : 3e-3;
  for (std::int64_t i = 0; i < got.size(); ++i)
    ASSERT_LE(std::abs(got.get(i) - wanted.get(i)), tolerance) << "token " << i / (kHeads * dim);
  for (std::int64_t i = 0; i < got_lse.size(); ++i)
    ASSERT_LE(std::abs(got_lse.get(i) - wanted_lse.get(i)), 1e-3) << "token " << i / kHeads;
}

INSTANTIATE_TEST_SUITE_P(Backends, GrowingLogits,
                         ::testing::Combine(::testing::Values(Backend::Unfused, Backend::Flash2),
                                            ::testing::Values(DType::F16, DType::BF16),
                                            ::testing::Values(64, 128, 256),
                                            ::testing::Values(Growth::Steady, Growth::Slow,
                                                              Growth::Falling, Growth::Jumps,
                                                              Growth::LateJump)));

}  // namespace
}  // namespace octavo::gpu_tests
