// SPDX-License-Identifier: Apache-2.0
// flash2 with RoPE in its loads of q, beside the host's backend on the same tokens.
#include "testing/compare.h"
#include "tests/gpu/gpu_test.h"
#include "tests/gpu/twins.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>

namespace octavo::gpu_tests {
namespace {

struct Turned {
  RopeStyle style;
  std::int32_t rotary_dim;
  std::int32_t head_dim;
  std::int32_t head_dim_v;
  std::int32_t num_q_heads;
  DType dtype;
};

class GpuFlash2Rope : public GpuTestWith<Turned> {
 protected:
  void SetUp() override {
    GpuTestWith::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) require_backend(Backend::Flash2);
  }
};

TEST_P(GpuFlash2Rope, TurnsAsTheHostDoes) {
  const Turned& p = GetParam();
  CacheConfig config;
  config.num_kv_heads = 1;
  config.head_dim = p.head_dim;
  config.head_dim_v = p.head_dim_v;
  config.dtype = p.dtype;
  config.max_seq_len = 128;
  config.page_size = 7;
  Twins twins(config);
  AttentionConfig attention;
  attention.num_q_heads = p.num_q_heads;
  attention.num_kv_heads = 1;
  attention.head_dim = p.head_dim;
  attention.head_dim_v = p.head_dim_v;
  attention.backend = Backend::Cpu;
  const Attention on_host(attention, twins.host.config());
  attention.backend = Backend::Flash2;
  const Attention on_gpu(attention, twins.gpu.config());
  const Rope rope{.style = p.style, .rotary_dim = p.rotary_dim};
  const testkit::Tolerance tolerance = testkit::tolerance_of(p.dtype, Compute::Same);
  std::uint64_t seed = 471;
  for (const std::int64_t tokens : {37, 1, 5}) {
    const auto [host_plan, gpu_plan] = twins.step({{5, tokens}});
    const TwinTensor q(p.dtype, {tokens, p.num_q_heads, p.head_dim}, seed++);
    const TwinTensor k(p.dtype, {tokens, 1, p.head_dim}, seed++);
    const TwinTensor v(p.dtype, {tokens, 1, p.head_dim_v}, seed++);
    testkit::HostTensor wanted(p.dtype, {tokens, p.num_q_heads, p.head_dim_v});
    testkit::HostTensor got = wanted;
    const testkit::DeviceTensor out(kGpu, got);
    LayerInputs inputs;
    inputs.rope = &rope;
    inputs.q = q.on_host();
    inputs.k = k.on_host();
    inputs.v = v.on_host();
    on_host.forward(host_plan, twins.host, 0, inputs, wanted.view());
    inputs.q = q.on_gpu();
    inputs.k = k.on_gpu();
    inputs.v = v.on_gpu();
    on_gpu.forward(gpu_plan, twins.gpu, 0, inputs, out.view());
    testkit::synchronize(kGpu);
    out.download(got);
    for (std::int64_t i = 0; i < got.size(); ++i) {
      const double allowed = 2.0 * (tolerance.atol + tolerance.rtol * std::abs(wanted.get(i)));
      ASSERT_NEAR(got.get(i), wanted.get(i), allowed) << tokens << " tokens, element " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Flash2, GpuFlash2Rope,
    ::testing::Values(Turned{RopeStyle::Half, 64, 64, 64, 3, DType::F16},
                      Turned{RopeStyle::Interleaved, 128, 128, 128, 16, DType::BF16},
                      Turned{RopeStyle::Half, 100, 256, 72, 5, DType::F16},
                      Turned{RopeStyle::Half, 576, 576, 512, 16, DType::BF16},
                      Turned{RopeStyle::Interleaved, 64, 576, 512, 5, DType::F16},
                      Turned{RopeStyle::Half, 264, 264, 264, 3, DType::BF16}),
    [](const auto& tested) {
      const Turned& p = tested.param;
      return fmt::format("{}{}_d{}_{}_h{}_{}", p.style == RopeStyle::Half ? "half" : "interleaved",
                         p.rotary_dim, p.head_dim, p.head_dim_v, p.num_q_heads, to_string(p.dtype));
    });

}  // namespace
}  // namespace octavo::gpu_tests
