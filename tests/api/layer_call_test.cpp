// SPDX-License-Identifier: Apache-2.0
// What a layer call makes of its tensors' strides and places, and when it reads the environment.
#include "testing/host_tensor.h"
#include "testing/random.h"

#include <octavo/attention.h>
#include <octavo/cache.h>
#include <octavo/error.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

namespace octavo {
namespace {

using testkit::HostTensor;

constexpr std::int32_t kQHeads = 6, kKvHeads = 2, kDim = 40;

HostTensor random_tensor(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed) {
  HostTensor tensor(dtype, std::move(shape));
  testkit::Random random(seed);
  for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.set(i, random.normal());
  return tensor;
}

struct Shape {
  const char* name;
  DType dtype;
  std::int64_t tokens;
  Backend backend;
};

// A sequence of 90 tokens, then a step of `tokens`.
class LayerCall : public ::testing::TestWithParam<Shape> {
 protected:
  LayerCall()
      : cache_(cache_config()),
        attention_(attention_config(), cache_.config()),
        q_(random_tensor(GetParam().dtype, {GetParam().tokens, kQHeads, kDim}, 1)) {
    const StepPlan plan = begin(90);
    HostTensor k = random_tensor(GetParam().dtype, {90, kKvHeads, kDim}, 2);
    LayerInputs inputs;
    inputs.k = inputs.v = k.view();
    attention_.append(plan, cache_, 0, inputs);
    plan_ = begin(GetParam().tokens);
  }

  static CacheConfig cache_config() {
    CacheConfig config;
    config.num_layers = 1;
    config.num_kv_heads = kKvHeads;
    config.head_dim = kDim;
    config.dtype = GetParam().dtype;
    config.max_num_seqs = 1;
    config.max_seq_len = 200;
    return config;
  }
  static AttentionConfig attention_config() {
    AttentionConfig config;
    config.num_q_heads = kQHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim = kDim;
    config.backend = GetParam().backend;
    return config;
  }

  StepPlan begin(std::int64_t tokens) {
    const PlanOutcome outcome = cache_.plan({{7, tokens}});
    cache_.begin(outcome.plan());
    return outcome.plan();
  }

  void attend(const ConstTensorView& q, const TensorView& out) {
    LayerInputs inputs;
    inputs.q = q;
    attention_.attend(plan_, cache_, 0, inputs, out);
  }

  HostTensor answer_of_dense_tensors() {
    HostTensor out(GetParam().dtype, {GetParam().tokens, kQHeads, kDim});
    attend(q_.view(), out.view());
    return out;
  }

  KvCache cache_;
  Attention attention_;
  StepPlan plan_;
  HostTensor q_;
};

// Elements 3 apart, the others NaN.
HostTensor spread(const HostTensor& dense, std::int64_t tokens) {
  HostTensor wide(dense.dtype(), {tokens, kQHeads, kDim, 3});
  for (std::int64_t i = 0; i < wide.size(); ++i) {
    wide.set(i, i % 3 == 0 ? dense.get(i / 3) : std::nan(""));
  }
  return wide;
}

template <typename ViewT>
ViewT every_third(ViewT view) {
  view.rank = 3;
  return view;
}

TEST_P(LayerCall, TakesAStridedLastAxis) {
  const HostTensor wanted = answer_of_dense_tensors();
  HostTensor q = spread(q_, GetParam().tokens);
  HostTensor out(GetParam().dtype, {GetParam().tokens, kQHeads, kDim, 3});
  for (std::int64_t i = 0; i < out.size(); ++i) out.set(i, 0.0);
  attend(every_third(q.view()), every_third(out.view()));
  for (std::int64_t i = 0; i < wanted.size(); ++i) ASSERT_EQ(out.get(3 * i), wanted.get(i)) << i;
  for (std::int64_t i = 0; i < out.size(); ++i) {
    ASSERT_TRUE(i % 3 == 0 || out.get(i) == 0.0) << i;
  }
}

TEST_P(LayerCall, MayWriteOverQ) {
  const HostTensor wanted = answer_of_dense_tensors();
  attend(q_.view(), q_.view());
  for (std::int64_t i = 0; i < wanted.size(); ++i) ASSERT_EQ(q_.get(i), wanted.get(i)) << i;
}

TEST_P(LayerCall, RefusesToWriteOverAPartOfQ) {
  TensorView out = q_.view();
  out.data = q_.data() + 2 * dtype_bytes(GetParam().dtype);
  try {
    attend(q_.view(), out);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "out.data: wanted memory that q does not use, got an overlap");
  }
}

TEST_P(LayerCall, MayWriteBesideQInTheSameRows) {
  const HostTensor wanted = answer_of_dense_tensors();
  const std::int64_t tokens = GetParam().tokens;
  HostTensor rows(GetParam().dtype, {tokens, 2 * kQHeads, kDim});
  constexpr std::int64_t kRow = std::int64_t{kQHeads} * kDim;
  for (std::int64_t i = 0; i < q_.size(); ++i) {
    rows.set(i / kRow * 2 * kRow + i % kRow, q_.get(i));
  }
  TensorView q = rows.view();
  q.shape[1] = kQHeads;
  TensorView out = q;
  out.data = rows.data() + kRow * dtype_bytes(GetParam().dtype);
  attend(q, out);
  for (std::int64_t i = 0; i < wanted.size(); ++i) {
    ASSERT_EQ(rows.get(i / kRow * 2 * kRow + kRow + i % kRow), wanted.get(i)) << i;
  }
}

TEST_P(LayerCall, ReadsTheEnvironmentWhenTheAttentionIsMade) {
  AttentionConfig config = attention_config();
  config.backend = Backend::Auto;
  setenv("OCTAVO_BACKEND", "unfused", 1);
  const Attention early(config, cache_.config());
  setenv("OCTAVO_BACKEND", "none of them", 1);
  EXPECT_EQ(early.backend(), Backend::Unfused);
  EXPECT_EQ(early.explain(plan_, TensorFormat::Thd).chosen, Backend::Unfused);
  HostTensor out(GetParam().dtype, {GetParam().tokens, kQHeads, kDim});
  LayerInputs inputs;
  inputs.q = q_.view();
  EXPECT_NO_THROW(early.attend(plan_, cache_, 0, inputs, out.view()));
  EXPECT_THROW(Attention(config, cache_.config()), Error);
  unsetenv("OCTAVO_BACKEND");
}

INSTANTIATE_TEST_SUITE_P(All, LayerCall,
                         ::testing::Values(Shape{"f32_decode", DType::F32, 1, Backend::Cpu},
                                           Shape{"f16_decode", DType::F16, 2, Backend::Cpu},
                                           Shape{"bf16_decode", DType::BF16, 1, Backend::Cpu},
                                           Shape{"f32_prefill", DType::F32, 70, Backend::Cpu},
                                           Shape{"bf16_prefill", DType::BF16, 70, Backend::Cpu},
                                           Shape{"unfused", DType::F32, 70, Backend::Unfused}),
                         [](const auto& shape) { return std::string(shape.param.name); });

}  // namespace
}  // namespace octavo
