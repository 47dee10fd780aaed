// SPDX-License-Identifier: Apache-2.0
// Sequences of a caller's cache that have more new tokens than keys, whose first tokens stand at
// negative positions: what the host gives, from every backend.
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

constexpr std::int32_t kQueryHeads = 4;
constexpr std::int32_t kKvHeads = 2;
constexpr std::int32_t kDim = 32;
constexpr std::int32_t kSlots = 40;

/// What sees which keys.
struct Sight {
  Mask mask = Mask::Causal;
  Window window;
};

class ShortCache : public GpuTestWith<std::tuple<Backend, Sight>> {};

TEST_P(ShortCache, GivesWhatTheHostGives) {
  const auto& [backend, sight] = GetParam();
  require_backend(backend);
  const std::vector<std::int32_t> new_tokens = {8, 3, 7, 40, 1, 5};
  const std::vector<std::int32_t> kv_lens = {3, 1, 0, 38, 12, 4};
  const auto num_seqs = static_cast<std::int32_t>(kv_lens.size());
  std::vector<std::int32_t> offsets = {0};
  for (const std::int32_t count : new_tokens) offsets.push_back(offsets.back() + count);

  AttentionConfig config;
  config.num_q_heads = kQueryHeads;
  config.num_kv_heads = kKvHeads;
  config.head_dim = kDim;
  config.mask = sight.mask;
  config.window = sight.window;
  const TwinTensor q(DType::F16, {offsets.back(), kQueryHeads, kDim}, 1);
  TwinTensor k(DType::F16, {num_seqs, kSlots, kKvHeads, kDim}, 2);
  TwinTensor v(DType::F16, {num_seqs, kSlots, kKvHeads, kDim}, 3);
  const std::vector<std::int64_t> shape = {offsets.back(), kQueryHeads, kDim};
  testkit::HostTensor wanted(DType::F16, shape);
  testkit::HostTensor got(DType::F16, shape);
  const testkit::DeviceTensor out(kGpu, got);
  testkit::HostTensor wanted_lse(DType::F32, {offsets.back(), kQueryHeads});
  testkit::HostTensor got_lse(DType::F32, {offsets.back(), kQueryHeads});
  const testkit::DeviceTensor lse(kGpu, got_lse);
  const TensorView lse_view = wanted_lse.view();
  const TensorView gpu_lse_view = lse.view();

  KvView view;
  view.k = k.host.view();
  view.v = v.host.view();
  view.num_rows = num_seqs;
  LayerInputs inputs;
  inputs.q = q.on_host();
  config.backend = Backend::Unfused;
  attend(config, view, {num_seqs, offsets.back(), offsets.data(), kv_lens.data()}, inputs,
         wanted.view(), &lse_view);

  DeviceInts gpu_offsets(offsets.size(), 0);
  DeviceInts gpu_lens(kv_lens.size(), 0);
  gpu_offsets.values = offsets;
  gpu_lens.values = kv_lens;
  gpu_offsets.upload();
  gpu_lens.upload();
  view.k = k.gpu->view();
  view.v = v.gpu->view();
  inputs.q = q.on_gpu();
  config.backend = backend;
  Workspace workspace(kGpu);
  StepArrays step{num_seqs, offsets.back(), gpu_offsets.get(), gpu_lens.get()};
  step.workspace = &workspace;
  const std::int64_t bytes = workspace.sizes(config, view, step, inputs, out.view()).good;
  const testkit::DeviceMemory memory(kGpu, static_cast<std::size_t>(bytes));
  workspace.use(memory.data(), bytes);
  workspace.plan(view, step);
  attend(config, view, step, inputs, out.view(), &gpu_lse_view);
  workspace.check();
  out.download(got);
  for (std::int64_t i = 0; i < got.size(); ++i)
    ASSERT_LE(std::abs(got.get(i) - wanted.get(i)), 4e-3)
        << "token " << i / (std::int64_t{kQueryHeads} * kDim);
  lse.download(got_lse);
  for (std::int64_t i = 0; i < got_lse.size(); ++i) {
    if (std::isinf(wanted_lse.get(i))) {
      ASSERT_EQ(got_lse.get(i), wanted_lse.get(i)) << "token " << i / kQueryHeads;
    } else {
      ASSERT_LE(std::abs(got_lse.get(i) - wanted_lse.get(i)), 1e-3) << "token " << i / kQueryHeads;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Backends, ShortCache,
    ::testing::Combine(::testing::Values(Backend::Unfused, Backend::Flash2),
                       ::testing::Values(Sight{}, Sight{Mask::Full}, Sight{Mask::Full, {-1, 2}},
                                         Sight{Mask::Causal, {3, -1}}, Sight{Mask::Full, {1, 0}})));

}  // namespace
}  // namespace octavo::gpu_tests
