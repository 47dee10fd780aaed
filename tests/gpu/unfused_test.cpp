// SPDX-License-Identifier: Apache-2.0
// What the suite's small cases don't meet in unfused: a workspace full of NaN, steps cut by heads
// and by tokens, rows that its softmax has to read twice. Weights lie over the scores that they
// come from, so a write before its read would show.
#include "kernels/cuda/unfused/matmul.h"
#include "tests/gpu/twins.h"

#include <octavo/backend.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace octavo::gpu_tests {
namespace {

constexpr std::int32_t kKvHeads = 2;
constexpr std::int32_t kQueryHeads = 6;

struct Results {
  testkit::HostTensor out;
  testkit::HostTensor lse;
};

AttentionConfig attention_config(std::int32_t dim, Mask mask) {
  AttentionConfig a;
  a.num_q_heads = kQueryHeads;
  a.num_kv_heads = kKvHeads;
  a.head_dim = dim;
  a.mask = mask;
  a.backend = Backend::Unfused;
  return a;
}

CacheConfig cache_config(DType dtype, std::int32_t dim, std::int64_t longest) {
  CacheConfig c;
  c.num_kv_heads = kKvHeads;
  c.head_dim = dim;
  c.dtype = dtype;
  c.max_num_seqs = 4;
  c.max_seq_len = longest;
  c.page_size = 16;
  return c;
}

/// Tokens of a step, the same on the host and on the GPU.
struct Tokens {
  Tokens(DType dtype, std::int64_t count, std::int32_t dim, std::uint64_t seed)
      : q(dtype, {count, kQueryHeads, dim}, seed),
        k(dtype, {count, kKvHeads, dim}, seed + 1),
        v(dtype, {count, kKvHeads, dim}, seed + 2) {}

  [[nodiscard]] LayerInputs on_host() const {
    LayerInputs inputs;
    inputs.q = q.on_host();
    inputs.k = k.on_host();
    inputs.v = v.on_host();
    return inputs;
  }
  [[nodiscard]] LayerInputs on_gpu() const {
    LayerInputs inputs;
    inputs.q = q.on_gpu();
    inputs.k = k.on_gpu();
    inputs.v = v.on_gpu();
    return inputs;
  }

  TwinTensor q, k, v;
};

Results on_host(const Attention& attention, const StepPlan& plan, KvCache& cache,
                const Tokens& tokens) {
  const auto& shape = tokens.q.host.shape();
  Results results{{tokens.q.host.dtype(), shape}, {DType::F32, {shape[0], shape[1]}}};
  const TensorView lse = results.lse.view();
  attention.forward(plan, cache, 0, tokens.on_host(), results.out.view(), &lse);
  return results;
}

Results on_gpu(const Attention& attention, const StepPlan& plan, KvCache& cache,
               const Tokens& tokens) {
  const auto& shape = tokens.q.host.shape();
  Results results{{tokens.q.host.dtype(), shape}, {DType::F32, {shape[0], shape[1]}}};
  const testkit::DeviceTensor out(kGpu, results.out);
  const testkit::DeviceTensor lse(kGpu, results.lse);
  const TensorView lse_view = lse.view();
  attention.forward(plan, cache, 0, tokens.on_gpu(), out.view(), &lse_view);
  testkit::synchronize(kGpu);
  out.download(results.out);
  lse.download(results.lse);
  return results;
}

void expect_near(const testkit::HostTensor& got, const testkit::HostTensor& wanted,
                 double tolerance) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::int64_t i = 0; i < got.size(); ++i)
    ASSERT_LE(std::abs(got.get(i) - wanted.get(i)), tolerance) << "element " << i;
}

double root_mean_square(const testkit::HostTensor& values) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < values.size(); ++i) sum += values.get(i) * values.get(i);
  return std::sqrt(sum / static_cast<double>(values.size()));
}

/// What a few roundings to the dtype come to, beside values of about 1.
double few_roundings(DType dtype) {
  if (dtype == DType::F32) return 1e-5;
  return dtype == DType::F16 ? 2e-3 : 1.5e-2;
}

using DTypeAndMask = std::tuple<DType, Mask>;

std::string dtype_and_mask(const ::testing::TestParamInfo<DTypeAndMask>& tested) {
  const auto& [dtype, mask] = tested.param;
  return std::string(to_string(dtype)) + "_" + to_string(mask);
}

class UnfusedWorkspace : public GpuTestWith<DTypeAndMask> {};

// Three sequences in a workspace for a part of one of their heads; head dims and keys are padded.
TEST_P(UnfusedWorkspace, GivesTheSameBitsWhateverLayInIt) {
  const auto& [dtype, mask] = GetParam();
  constexpr std::int32_t kDim = 20;
  const std::vector<SequenceStep> step = {{1, 333}, {2, 1}, {3, 130}};
  const AttentionConfig config = attention_config(kDim, mask);
  const Tokens tokens(dtype, 464, kDim, 1);
  CacheConfig host_config = cache_config(dtype, kDim, 400);
  KvCache host(host_config);
  const StepPlan host_plan = host.plan(step).plan();
  host.begin(host_plan);
  const Results wanted = on_host(Attention(config, host_config), host_plan, host, tokens);

  const testkit::DeviceMemory workspace(kGpu, kernels::cuda::Matmul::kScratchBytes + 400'000);
  std::optional<Results> before;
  for (const std::byte fill : {std::byte{0xFF}, std::byte{0}, std::byte{0x7F}}) {
    CacheConfig there = host_config;
    there.device = kGpu;
    there.workspace = workspace.data();
    there.workspace_bytes = static_cast<std::int64_t>(workspace.size());
    KvCache cache(there);
    const StepPlan plan = cache.plan(step).plan();
    cache.begin(plan);
    testkit::fill_device(kGpu, workspace.data(), fill, workspace.size());
    testkit::synchronize(kGpu);
    const Results got = on_gpu(Attention(config, there), plan, cache, tokens);
    expect_near(got.out, wanted.out, few_roundings(dtype));
    expect_near(got.lse, wanted.lse, 1e-3);
    if (before) {
      EXPECT_TRUE(got.out == before->out);
      EXPECT_TRUE(got.lse == before->lse);
    }
    before = got;
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, UnfusedWorkspace,
                         ::testing::Combine(::testing::Values(DType::F32, DType::F16, DType::BF16),
                                            ::testing::Values(Mask::Causal, Mask::Full)),
                         dtype_and_mask);

class UnfusedRows : public GpuTestWith<std::tuple<DType, std::int64_t>> {};

// A key count in the middle of a warp's keys, of a block's, of the last of three of a block's.
TEST_P(UnfusedRows, OfAnyLengthGiveWhatTheHostGives) {
  const auto& [dtype, keys] = GetParam();
  constexpr std::int32_t kDim = 16;
  constexpr std::int64_t kNew = 3;
  Twins twins(cache_config(dtype, kDim, keys));
  const Attention host(attention_config(kDim, Mask::Causal), twins.host.config());
  const Attention gpu(attention_config(kDim, Mask::Causal), twins.gpu.config());
  {
    const Tokens past(dtype, keys - kNew, kDim, 11);
    const auto [host_plan, gpu_plan] = twins.step({{1, keys - kNew}});
    host.append(host_plan, twins.host, 0, past.on_host());
    gpu.append(gpu_plan, twins.gpu, 0, past.on_gpu());
    testkit::synchronize(kGpu);
  }
  const Tokens tokens(dtype, kNew, kDim, 21);
  const auto [host_plan, gpu_plan] = twins.step({{1, kNew}});
  const Results wanted = on_host(host, host_plan, twins.host, tokens);
  const Results got = on_gpu(gpu, gpu_plan, twins.gpu, tokens);
  // The mean of so many values is small: what counts is the error beside it. Scores of thirty keys
  // that are read too late would show.
  const double most = dtype == DType::F32 ? 1e-3 : 2.0 * few_roundings(dtype);
  expect_near(got.out, wanted.out, most * root_mean_square(wanted.out));
  expect_near(got.lse, wanted.lse, 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Lengths, UnfusedRows,
                         ::testing::Combine(::testing::Values(DType::F32, DType::F16, DType::BF16),
                                            ::testing::Values(700, 1500, 9000, 16'384, 16'385,
                                                              45'000)));

}  // namespace
}  // namespace octavo::gpu_tests
