// SPDX-License-Identifier: Apache-2.0
// What a layer call refuses: tensors, layers, plans. Nothing may have been written by then.
#include "testing/host_tensor.h"
#include "tests/refusal/expect.h"

#include <octavo/attention.h>
#include <octavo/merge.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace octavo::refusal {
namespace {

using testkit::HostTensor;

CacheConfig cache_config() {
  CacheConfig config;
  config.num_layers = 2;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.head_dim_v = 4;
  config.max_num_seqs = 3;
  config.max_seq_len = 40;
  config.page_size = 4;
  return config;
}

AttentionConfig attention_config() {
  AttentionConfig config;
  config.num_q_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.head_dim_v = 4;
  return config;
}

// Right arguments of a step of 3 + 1 tokens; tests spoil one of them.
class Layer : public ::testing::Test {
 protected:
  Layer()
      : cache_(cache_config()),
        attention_(attention_config(), cache_config()),
        plan_(cache_.plan({{0, 3}, {1, 1}}).plan()),
        q_(DType::F32, {4, 4, 8}),
        k_(DType::F32, {4, 2, 8}),
        v_(DType::F32, {4, 2, 4}),
        out_(DType::F32, {4, 4, 4}),
        lse_(DType::F32, {4, 4}) {
    inputs_.q = q_.view();
    inputs_.k = k_.view();
    inputs_.v = v_.view();
    out_view_ = out_.view();
    lse_view_ = lse_.view();
  }

  // The message of the call with the arguments as they are now.
  std::string refused(ErrorCode code = ErrorCode::InvalidArgument) {
    if (begins_) cache_.begin(plan_);
    const Snapshot before = snapshot_of(cache_);
    const HostTensor out = out_;
    const std::string message = message_of(
        [&] { attention_.forward(plan_, cache_, layer_, inputs_, out_view_, &lse_view_); }, code);
    EXPECT_EQ(snapshot_of(cache_), before);
    EXPECT_TRUE(out_ == out);
    return message;
  }

  KvCache cache_;
  Attention attention_;
  StepPlan plan_;
  HostTensor q_, k_, v_, out_, lse_;
  LayerInputs inputs_;
  TensorView out_view_, lse_view_;
  std::int32_t layer_ = 0;
  bool begins_ = true;
};

TEST_F(Layer, AcceptsTheUnspoiledArguments) {
  cache_.begin(plan_);
  EXPECT_NO_THROW(attention_.forward(plan_, cache_, 1, inputs_, out_view_, &lse_view_));
}

TEST_F(Layer, NamesAPlanThatWasNotBegun) {
  begins_ = false;
  EXPECT_EQ(refused(),
            "plan: wanted the one that this cache began last, got another one, or one that was "
            "not begun");
}

TEST_F(Layer, NamesAPlanThatIsNoLongerTheBegunOne) {
  cache_.begin(plan_);
  cache_.begin(cache_.plan({{1, 1}}).plan());
  begins_ = false;
  EXPECT_EQ(refused(),
            "plan: wanted the one that this cache began last, got another one, or one that was "
            "not begun");
}

TEST_F(Layer, NamesALayerBehindTheLast) {
  layer_ = 2;
  EXPECT_EQ(refused(), "layer: wanted 0 … 1, got 2");
}

TEST_F(Layer, NamesANegativeLayer) {
  layer_ = -1;
  EXPECT_EQ(refused(), "layer: wanted 0 … 1, got -1");
}

TEST_F(Layer, NamesQOfTooFewTokens) {
  inputs_.q.shape[0] = 3;
  EXPECT_EQ(refused(), "q.shape: wanted [>= 4, 4, 8] (thd), got [3, 4, 8]");
}

TEST_F(Layer, NamesKOfOtherHeads) {
  inputs_.k.shape[1] = 3;
  EXPECT_EQ(refused(), "k.shape: wanted [>= 4, 2, 8] (thd), got [4, 3, 8]");
}

TEST_F(Layer, NamesVOfAnotherWidth) {
  inputs_.v.shape[2] = 8;
  EXPECT_EQ(refused(), "v.shape: wanted [>= 4, 2, 4] (thd), got [4, 2, 8]");
}

TEST_F(Layer, NamesOutOfAnotherWidth) {
  out_view_.shape[2] = 8;
  EXPECT_EQ(refused(), "out.shape: wanted [>= 4, 4, 4] (thd), got [4, 4, 8]");
}

TEST_F(Layer, NamesALseOfTooFewTokens) {
  lse_view_.shape[0] = 2;
  EXPECT_EQ(refused(), "lse.shape: wanted [>= 4, 4], got [2, 4]");
}

TEST_F(Layer, NamesALseOfAnotherDtype) {
  lse_view_.dtype = DType::BF16;
  EXPECT_EQ(refused(), "lse.dtype: wanted f32, got bf16");
}

TEST_F(Layer, NamesABatchThatIsTooShort) {
  inputs_.format = TensorFormat::Bshd;
  inputs_.k = ConstTensorView(k_.data(), DType::F32, {1, 3, 2, 8});
  EXPECT_EQ(refused(), "k.shape: wanted [>= 2, >= 3, 2, 8] (bshd), got [1, 3, 2, 8]");
}

TEST_F(Layer, NamesARankThatTheFormatDoesNotHave) {
  inputs_.format = TensorFormat::Sbhd;
  EXPECT_EQ(refused(), "k.rank: wanted 4, got 3");
}

TEST_F(Layer, NamesNullData) {
  inputs_.v.data = nullptr;
  EXPECT_EQ(refused(), "v.data: wanted a pointer, got null");
}

TEST_F(Layer, NamesNullOut) {
  out_view_.data = nullptr;
  EXPECT_EQ(refused(), "out.data: wanted a pointer, got null");
}

TEST_F(Layer, NamesADeviceThatIsNotTheCaches) {
  inputs_.q.device = {DeviceType::Cuda, 0};
  EXPECT_EQ(refused(), "q.device: wanted cpu, got cuda:0");
}

TEST_F(Layer, NamesAnIntegerDtype) {
  inputs_.k.dtype = DType::I32;
  EXPECT_EQ(refused(), "k.dtype: wanted f32, f16 or bf16, got i32");
}

TEST_F(Layer, NamesAnOutputDtypeThatIsNeitherF32NorQs) {
  out_view_.dtype = DType::F16;
  EXPECT_EQ(refused(), "out.dtype: wanted f32, got f16");
}

TEST_F(Layer, NamesAnOutputWhoseRowsOverlap) {
  out_view_.strides[0] = 0;
  EXPECT_NE(refused().find("out.strides: wanted at least"), std::string::npos);
}

TEST_F(Layer, NamesAnOutputInKsMemory) {
  inputs_.k = ConstTensorView(out_.data(), DType::F32, {4, 2, 8});
  EXPECT_EQ(refused(), "out.data: wanted memory that k does not use, got an overlap");
}

TEST_F(Layer, NamesAnOutputInQsMemory) {
  out_view_.data = q_.data();
  EXPECT_EQ(refused(), "out.data: wanted memory that q does not use, got an overlap");
}

TEST_F(Layer, NamesANegativeExtent) {
  inputs_.q.shape[0] = -4;
  EXPECT_EQ(refused(), "q.shape: wanted extents of at least 0, got [-4, 4, 8]");
}

TEST_F(Layer, NamesAnOddRotaryDim) {
  Rope rope;
  rope.rotary_dim = 3;
  inputs_.rope = &rope;
  EXPECT_EQ(refused(), "rope.rotary_dim: wanted an even number up to head_dim (8), got 3");
}

TEST_F(Layer, NamesARotaryDimBeyondTheHead) {
  Rope rope;
  rope.rotary_dim = 10;
  inputs_.rope = &rope;
  EXPECT_EQ(refused(), "rope.rotary_dim: wanted an even number up to head_dim (8), got 10");
}

TEST_F(Layer, NamesABaseThatIsNotPositive) {
  Rope rope;
  rope.base = 0.0;
  inputs_.rope = &rope;
  EXPECT_EQ(refused(), "rope.base: wanted a positive finite number, got 0");
}

TEST_F(Layer, NamesOneTableWithoutTheOther) {
  const std::vector<float> table(40 * 4);
  Rope rope;
  rope.cos = table.data();
  rope.num_table_positions = 40;
  inputs_.rope = &rope;
  EXPECT_EQ(refused(), "rope: wanted cos and sin or neither, got cos alone");
}

TEST_F(Layer, NamesAPositionBehindTheTables) {
  const std::vector<float> table(2 * 4);
  Rope rope;
  rope.cos = rope.sin = table.data();
  rope.num_table_positions = 2;
  inputs_.rope = &rope;
  EXPECT_EQ(refused(), "position of a new token: wanted 0 … 1 (rope.num_table_positions), got 2");
}

TEST_F(Layer, NamesANegativePosition) {
  const std::vector<std::int32_t> positions = {0, 1, -2, 3};
  Rope rope;
  inputs_.rope = &rope;
  inputs_.positions = positions.data();
  EXPECT_EQ(refused(), "position of a new token: wanted at least 0, got -2");
}

TEST_F(Layer, NamesACacheThatItWasNotMadeFor) {
  CacheConfig other = cache_config();
  other.head_dim_v = 8;
  KvCache cache(other);
  const StepPlan plan = cache.plan({{0, 1}}).plan();
  cache.begin(plan);
  EXPECT_EQ(message_of([&] { attention_.forward(plan, cache, 0, inputs_, out_view_); }),
            "cache: wanted paged f32 with 2 KV heads of 8/4 on cpu (as this Attention was made "
            "for), got paged f32 with 2 KV heads of 8/8 on cpu");
}

template <typename ChangeT>
std::string construction(ChangeT&& change, ErrorCode code = ErrorCode::InvalidArgument) {
  AttentionConfig config = attention_config();
  change(config);
  return message_of([&] { Attention attention(config, cache_config()); }, code);
}

TEST(AttentionConfigRefusal, NamesHeadsThatDontDivide) {
  EXPECT_EQ(construction([](AttentionConfig& c) { c.num_q_heads = 5; }),
            "num_q_heads: wanted a multiple of num_kv_heads (2), got 5");
}

TEST(AttentionConfigRefusal, NamesHeadsThatAreNotTheCaches) {
  EXPECT_EQ(construction([](AttentionConfig& c) { c.num_kv_heads = 4; }),
            "num_kv_heads: wanted 2 (the cache's), got 4");
}

TEST(AttentionConfigRefusal, NamesAWidthThatIsNotTheCaches) {
  EXPECT_EQ(construction([](AttentionConfig& c) { c.head_dim_v = 0; }),
            "head_dim_v: wanted 4 (the cache's), got 8");
}

TEST(AttentionConfigRefusal, NamesAWindowBelowMinusOne) {
  EXPECT_EQ(construction([](AttentionConfig& c) { c.window.left = -2; }),
            "window.left: wanted -1 (no bound) or more, got -2");
}

TEST(AttentionConfigRefusal, NamesANegativeSoftcap) {
  EXPECT_EQ(construction([](AttentionConfig& c) { c.softcap = -1.0F; }),
            "softcap: wanted 0 or a positive finite number, got -1");
}

TEST(AttentionConfigRefusal, NamesAScaleThatIsNoNumber) {
  EXPECT_EQ(construction([](AttentionConfig& c) {
              c.softmax_scale = std::numeric_limits<float>::infinity();
            }),
            "softmax_scale: wanted a finite number, got inf");
}

TEST(AttentionConfigRefusal, NamesNegativeThreads) {
  EXPECT_EQ(construction([](AttentionConfig& c) { c.num_threads = -1; }),
            "num_threads: wanted at least 0 and at most 2^31 - 1, got -1");
}

TEST(AttentionConfigRefusal, ListsWhatABackendLacksForFp8) {
  const std::string message = construction(
      [](AttentionConfig& c) {
        c.compute = Compute::Fp8;
        c.backend = Backend::Cpu;
      },
      ErrorCode::Unsupported);
  EXPECT_NE(message.find("missing: compute fp8"), std::string::npos) << message;
}

TEST(AttentionConfigRefusal, ListsWhatEveryBackendLacksUnderAuto) {
  const std::string message =
      construction([](AttentionConfig& c) { c.compute = Compute::Fp8; }, ErrorCode::Unsupported);
  EXPECT_NE(message.find("no backend can run this"), std::string::npos) << message;
}

TEST(AttentionConfigRefusal, SaysThatABackendIsNotCompiled) {
  const std::string message =
      construction([](AttentionConfig& c) { c.backend = Backend::Flash3; }, ErrorCode::NotCompiled);
  EXPECT_NE(message.find("compiled: "), std::string::npos) << message;
  EXPECT_NE(message.find("cpu, unfused"), std::string::npos) << message;  // behind fused, if any
}

TEST(MergeRefusal, NamesAPartialOfAnotherShape) {
  HostTensor out(DType::F32, {2, 3, 4});
  HostTensor part(DType::F32, {2, 3, 5});
  HostTensor lse(DType::F32, {2, 3});
  const std::vector<Partial> partials = {{part.view(), lse.view()}};
  EXPECT_EQ(message_of([&] { merge(partials, out.view()); }),
            "partials[0].out.shape: wanted 4 at axis 2, got [2, 3, 5]");
}

TEST(MergeRefusal, NamesAPartialWithoutAnLse) {
  HostTensor out(DType::F32, {2, 3, 4});
  HostTensor part(DType::F32, {2, 3, 4});
  const std::vector<Partial> partials = {{part.view(), {}}};
  EXPECT_EQ(message_of([&] { merge(partials, out.view()); }),
            "partials[0].lse.rank: wanted 2, got 0");
}

}  // namespace
}  // namespace octavo::refusal
