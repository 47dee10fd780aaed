// SPDX-License-Identifier: Apache-2.0
// Wrong input on a GPU: what is said, and that nothing was changed.
#include "tests/gpu/refusal.h"
#include "tests/conformance/suite.h"
#include "tests/gpu/twins.h"

#include <octavo/error.h>

#include <gmock/gmock.h>

#include <string>

namespace octavo::gpu_tests {
namespace {

using ::testing::HasSubstr;

class GpuLayer : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    cache_.emplace(small());
    plan_ = cache_->plan({{1, 3}}).plan();
    cache_->begin(plan_);
    q_.emplace(DType::BF16, std::vector<std::int64_t>{3, 2, 16}, 1);
    out_.emplace(DType::BF16, std::vector<std::int64_t>{3, 2, 16}, 2);
    inputs_.q = inputs_.k = inputs_.v = q_->on_gpu();
  }

  std::string forward() {
    return refused([&] {
      Attention(attention(), small())
          .forward(plan_, *cache_, 0, inputs_, out_->gpu->view(), nullptr, {});
    });
  }

  std::optional<KvCache> cache_;
  StepPlan plan_;
  std::optional<TwinTensor> q_, out_;
  LayerInputs inputs_;
};

TEST_F(GpuLayer, NamesAHostPointerWhereDeviceMemoryIsDue) {
  inputs_.k.data = q_->on_host().data;
  EXPECT_EQ(forward(), "k.data: wanted memory of cuda:0, got memory of the host");
  inputs_.k = q_->on_gpu();
  EXPECT_EQ(forward(), "nothing was thrown");
}

TEST_F(GpuLayer, NamesATensorOfTheHost) {
  inputs_.v = q_->on_host();
  EXPECT_EQ(forward(), "v.device: wanted cuda:0, got cpu");
}

TEST_F(GpuLayer, NamesATensorOfAnotherGpu) {
  inputs_.q.device.index = 1;
  EXPECT_EQ(forward(), "q.device: wanted cuda:0, got cuda:1");
}

TEST_F(GpuLayer, NamesSinksOfTheHost) {
  const float sinks[2] = {};
  inputs_.sinks = sinks;
  EXPECT_EQ(forward(), "sinks: wanted memory of cuda:0, got memory of the host");
}

TEST_F(GpuLayer, LeavesStorageAloneWhenItRefuses) {
  const TensorView keys = cache_->key_storage(0);
  testkit::fill_device(kGpu, keys.data, std::byte{0x5A}, 64);
  inputs_.alibi_slopes = reinterpret_cast<const float*>(&inputs_);
  EXPECT_THAT(forward(), HasSubstr("alibi_slopes"));
  std::vector<std::byte> bytes(64);
  testkit::read_device(kGpu, bytes.data(), keys.data, bytes.size());
  EXPECT_EQ(bytes, std::vector<std::byte>(64, std::byte{0x5A}));
}

// Positions in device memory are nobody's to check: the kernels keep inside the tables.
TEST_F(GpuLayer, TakesTheTablesNearestRowForPositionsBeyondThem) {
  const TwinTensor cos(DType::F32, {4, 8}, 5);
  const TwinTensor sin(DType::F32, {4, 8}, 6);
  const Rope rope{.cos = cos.gpu->floats(), .sin = sin.gpu->floats(), .num_table_positions = 4};
  inputs_.rope = &rope;
  const auto keys_at = [&](const std::vector<std::int32_t>& positions) {
    testkit::DeviceMemory memory(kGpu, positions.size() * sizeof(std::int32_t));
    memory.upload(positions.data(), memory.size());
    inputs_.positions = reinterpret_cast<const std::int32_t*>(memory.data());
    Attention(attention(), small()).append(plan_, *cache_, 0, inputs_);
    const TensorView keys = cache_->key_storage(0);
    std::vector<std::byte> bytes(Twins::bytes_of(keys));
    testkit::read_device(kGpu, bytes.data(), keys.data, bytes.size());
    return bytes;
  };
  const auto inside = keys_at({0, 2, 3});
  EXPECT_EQ(keys_at({-7, 2, 1'000'000}), inside);
  EXPECT_NE(keys_at({1, 2, 3}), inside);
}

TEST_F(GpuLayer, BackendsOfTheHostSayThatTheyAre) {
  AttentionConfig a = attention();
  a.backend = Backend::Cpu;
  EXPECT_THAT(refused([&] { Attention(a, small()); }, ErrorCode::Unsupported),
              HasSubstr("missing: device cuda"));
}

TEST_F(GpuLayer, NamesPointersOfAnotherGpu) {
  constexpr Device kOther{DeviceType::Cuda, 1};
  if (!testkit::device_trouble(kOther).empty()) GTEST_SKIP() << "needs two GPUs";
  const testkit::DeviceMemory other(kOther, 4096);
  inputs_.v.data = other.data();
  EXPECT_EQ(forward(), "v.data: wanted memory of cuda:0, got memory of cuda:1");
  inputs_.v = q_->on_gpu();
  inputs_.sinks = reinterpret_cast<const float*>(other.data());
  EXPECT_EQ(forward(), "sinks: wanted memory of cuda:0, got memory of cuda:1");
}

TEST_F(GpuTest, NamesAGpuThatIsNotThere) {
  CacheConfig c = small();
  c.device.index = 99;
  EXPECT_THAT(refused([&] { KvCache cache(c); }), HasSubstr("device.index: wanted 0 …"));
}

TEST_F(GpuTest, SaysWhatMemoryIsFreeWhenThereIsTooLittle) {
  CacheConfig c = small();
  c.num_layers = 1000;
  c.max_num_seqs = 1000;
  c.max_seq_len = 1'000'000;
  c.workspace_bytes = std::int64_t{1} << 30;
  EXPECT_THAT(refused([&] { KvCache cache(c); }, ErrorCode::OutOfMemory),
              HasSubstr("bytes of cuda:0"));
  KvCache usable(small());
  EXPECT_TRUE(usable.plan({{1, 3}}).ok());
}

TEST_F(GpuTest, NamesAWorkspaceThatIsTooSmall) {
  CacheConfig c = small();
  c.workspace_bytes = 1000;
  EXPECT_THAT(refused([&] { KvCache cache(c); }), HasSubstr("workspace_bytes: wanted at least"));
}

TEST_F(GpuTest, TakesTheLeastWorkspaceAndTheCallersMemory) {
  CacheConfig c = small();
  c.num_layers = 2;
  c.num_pages = 8;
  const CacheSizes sizes = cache_sizes(c);
  testkit::DeviceMemory workspace(kGpu, static_cast<std::size_t>(sizes.least_workspace));
  // K and V interleaved, heads outside slots, as other engines keep them: [layer, page, K or V,
  // head, slot, dim].
  testkit::DeviceMemory memory(kGpu, static_cast<std::size_t>(sizes.keys + sizes.values));
  testkit::fill_device(kGpu, memory.data(), std::byte{0xFF}, memory.size());
  c.workspace = workspace.data();
  c.workspace_bytes = sizes.least_workspace;
  c.keys = TensorView(memory.data(), DType::BF16, {2, 8, 16, 2, 16}, kGpu);
  c.keys.strides = {8 * 2 * 2 * 16 * 16, 2 * 2 * 16 * 16, 16, 16 * 16, 1};
  c.values = c.keys;
  c.values.data = memory.data() + 2 * 16 * 16 * dtype_bytes(DType::BF16);
  KvCache theirs(c);
  KvCache ours(small());
  TwinTensor q(DType::BF16, {40, 2, 16}, 1);
  TwinTensor out(DType::BF16, {40, 2, 16}, 2);
  TwinTensor out_theirs(DType::BF16, {40, 2, 16}, 3);
  LayerInputs inputs;
  inputs.q = inputs.k = inputs.v = q.on_gpu();
  for (KvCache* cache : {&ours, &theirs}) {
    const StepPlan plan = cache->plan({{1, 30}, {2, 10}}).plan();
    cache->begin(plan);
    TwinTensor& to = cache == &ours ? out : out_theirs;
    AttentionConfig config = attention();
    config.backend = Backend::Unfused;  // that the least workspace suffices for
    Attention(config, cache->config())
        .forward(plan, *cache, cache->config().num_layers - 1, inputs, to.gpu->view());
  }
  out.gpu->download(out.host);
  out_theirs.gpu->download(out_theirs.host);
  EXPECT_TRUE(out.host == out_theirs.host);
  EXPECT_EQ(theirs.stats().bytes, 0);
}

// Page ids whose products with the page's size pass 2^31, near the end of a pool of 60 GB.
TEST_F(GpuTest, PagesNearTheEndOfAHugePoolWork) {
  CacheConfig c;
  c.num_kv_heads = 8;
  c.head_dim = 128;
  c.dtype = DType::BF16;
  c.max_num_seqs = 4;
  c.page_size = 16;
  c.num_pages = 900'000;
  c.max_seq_len = c.num_pages * c.page_size;
  const testkit::Case value =
      testkit::make_case(testkit::parse_spec("b2 q3 s100 steps3 hq8 hkv8 d128 p16 bf16 seed9"));
  c.device = kGpu;
  c.workspace_bytes = std::int64_t{64} << 20U;
  std::optional<KvCache> cache;
  try {
    cache.emplace(c);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::OutOfMemory) throw;
    GTEST_SKIP() << error.what();
  }
  // All pages but the last 100 belong to a sequence that never gets a token written.
  const StepPlan filler = cache->plan({{99, (c.num_pages - 100) * c.page_size}}).plan();
  cache->begin(filler);
  AttentionConfig a = value.attention;
  a.backend = Backend::Unfused;
  const Attention attention(a, cache->config());
  testkit::Comparison comparison;
  for (std::size_t i = 0; i < value.steps.size(); ++i) {
    const testkit::CaseStep& step = value.steps[i];
    const StepPlan plan = cache->plan(step.sequences).plan();
    EXPECT_GT(plan.entries().back(), c.num_pages - 120);
    cache->begin(plan);
    const testkit::DeviceTensor q(kGpu, step.q);
    const testkit::DeviceTensor k(kGpu, step.k);
    const testkit::DeviceTensor v(kGpu, step.v);
    testkit::HostTensor out(DType::BF16, step.out.shape());
    testkit::HostTensor lse(DType::F32, {testkit::total_new_tokens(step), 8});
    const testkit::DeviceTensor gpu_out(kGpu, out);
    const testkit::DeviceTensor gpu_lse(kGpu, lse);
    LayerInputs inputs;
    inputs.q = q.view();
    inputs.k = k.view();
    inputs.v = v.view();
    inputs.format = value.format;
    const TensorView lse_view = gpu_lse.view();
    attention.forward(plan, *cache, 0, inputs, gpu_out.view(), &lse_view);
    gpu_out.download(out);
    gpu_lse.download(lse);
    compare_step(value, static_cast<std::int64_t>(i), out, lse, comparison);
  }
  EXPECT_TRUE(comparison.ok()) << comparison.worst.to_string();
}

}  // namespace
}  // namespace octavo::gpu_tests
