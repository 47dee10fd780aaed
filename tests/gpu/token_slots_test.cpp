// SPDX-License-Identifier: Apache-2.0
// Where the step's kernel says that new tokens go, against the plan; and that append goes by it for
// the step's own tokens alone.
#include "api/cache_impl.h"
#include "tests/gpu/twins.h"

#include <octavo/graphed_step.h>

#include <string>
#include <vector>

namespace octavo::gpu_tests {
namespace {

using kernels::TokenIndex;
using kernels::TokenSlot;

constexpr std::int32_t kHeads = 2;
constexpr std::int32_t kDim = 8;

struct Kind {
  CacheKind kind = CacheKind::Paged;
  std::int32_t page_size = 16;
  std::int64_t max_seq_len = 200;
};

CacheConfig config_of(const Kind& kind) {
  CacheConfig c;
  c.kind = kind.kind;
  c.num_kv_heads = kHeads;
  c.head_dim = kDim;
  c.dtype = DType::F16;
  c.max_num_seqs = 40;
  c.max_seq_len = kind.max_seq_len;
  c.page_size = kind.page_size;
  return c;
}

/// Begins the plan; what is in device memory then is what the plan says.
void expect_slots_of(KvCache& cache, const StepPlan& plan) {
  cache.begin(plan);
  const kernels::StepBatch batch = cache.impl().gpu->batch(plan.num_seqs(), plan.num_tokens());
  std::vector<TokenSlot> slots(static_cast<std::size_t>(plan.num_tokens()));
  std::vector<TokenIndex> indices(slots.size());
  ASSERT_LE(plan.num_tokens(), batch.max_token_slots);
  if (slots.empty()) return;
  testkit::read_device(kGpu, slots.data(), batch.token_slots, slots.size() * sizeof(TokenSlot));
  testkit::read_device(kGpu, indices.data(), batch.token_indices,
                       indices.size() * sizeof(TokenIndex));
  std::size_t token = 0;
  for (std::int32_t b = 0; b < plan.num_seqs(); ++b) {
    const auto at = static_cast<std::size_t>(b);
    const std::int32_t num_new = plan.token_offsets()[at + 1] - plan.token_offsets()[at];
    for (std::int32_t i = 0; i < num_new; ++i, ++token) {
      const auto slot = plan.slot(b, i);
      const TokenSlot wanted{static_cast<std::int32_t>(slot / plan.page_size()),
                             static_cast<std::int32_t>(slot % plan.page_size()),
                             plan.position(b, i), i == num_new - 1 ? plan.clear_lens()[at] : 0};
      ASSERT_TRUE(slots[token] == wanted) << "token " << i << " of batch row " << b;
      ASSERT_TRUE(indices[token] == (TokenIndex{b, i})) << "token " << i << " of batch row " << b;
    }
  }
}

class TokenSlots : public GpuTestWith<Kind> {
 protected:
  KvCache make() {
    CacheConfig config = config_of(GetParam());
    config.device = kGpu;
    return KvCache(config);
  }
};

TEST_P(TokenSlots, AreThePlansThroughALife) {
  KvCache cache = make();
  expect_slots_of(cache, cache.plan({{1, 21}, {2, 0}, {3, 64}, {4, 1}, {5, 100}}).plan());
  expect_slots_of(cache, cache.plan({{4, 1}, {2, 17}, {1, 1}, {5, 2}}).plan());
  static_cast<void>(cache.fork(1, 6));
  static_cast<void>(cache.fork(6, 7));
  expect_slots_of(cache, cache.plan({{7, 1}, {6, 3}, {1, 1}}).plan());
  cache.truncate(5, 33);
  cache.release(3);
  expect_slots_of(cache, cache.plan({{9, 150}, {5, 1}, {4, 0}}).plan());
  expect_slots_of(cache, cache.plan(std::vector<SequenceStep>{}).plan());
  expect_slots_of(cache, cache.plan({{5, 1}}).plan());
}

TEST_P(TokenSlots, AreThoseOfThePlanThatFollowsAnUndo) {
  KvCache cache = make();
  expect_slots_of(cache, cache.plan({{1, 16}, {2, 5}}).plan());
  const StepPlan undone = cache.plan({{3, 50}, {1, 30}, {2, 1}}).plan();
  cache.undo(undone);
  expect_slots_of(cache, cache.plan({{2, 40}, {1, 1}, {4, 2}}).plan());
}

// More sequences than a block of the kernel looks at, some of them without new tokens.
TEST_P(TokenSlots, AreThePlansOfManySequences) {
  KvCache cache = make();
  std::vector<SequenceStep> lines;
  for (SequenceId id = 0; id < 40; ++id) lines.push_back({id, id % 7 == 3 ? 0 : 3 * id});
  expect_slots_of(cache, cache.plan(lines).plan());
  for (SequenceStep& line : lines) line.new_tokens = line.id % 5 == 0 ? 0 : 1;
  expect_slots_of(cache, cache.plan(lines).plan());
}

INSTANTIATE_TEST_SUITE_P(Kinds, TokenSlots,
                         ::testing::Values(Kind{}, Kind{.page_size = 1}, Kind{.page_size = 7},
                                           Kind{.kind = CacheKind::Contiguous}));

TEST_F(GpuTest, SlotsOfAStepThatIsUploadedInPartsAreThePlans) {
  CacheConfig config = config_of({.page_size = 1, .max_seq_len = 100'000});
  config.max_num_seqs = 12;
  config.num_pages = 200'000;
  config.device = kGpu;
  KvCache cache(config);
  expect_slots_of(cache, cache.plan({{1, 3}, {2, 90'000}, {3, 70'000}, {4, 1}}).plan());
  expect_slots_of(cache, cache.plan({{3, 2}, {2, 1}, {4, 100}}).plan());
}

/// A graph for more tokens than the cache has slots, after a step of many tokens and before one of
/// few: rows beyond the step write nothing.
void expect_padding_to_write_nothing(TensorFormat format) {
  Twins twins(config_of({.kind = CacheKind::Contiguous, .max_seq_len = 5}));
  twins.poison();
  const StepMaxima maxima{
      .num_seqs = 40, .num_tokens = 1'000, .max_new_tokens = 4, .max_kv_len = 5};
  std::vector<std::int64_t> shape = {maxima.num_tokens, kHeads, kDim};
  if (format == TensorFormat::Bshd) shape = {40, 4, kHeads, kDim};
  const TwinTensor k(DType::F16, shape, 1);
  const TwinTensor v(DType::F16, shape, 2);
  const TwinTensor out(DType::F16, shape, 3);
  AttentionConfig a;
  a.num_q_heads = a.num_kv_heads = kHeads;
  a.head_dim = kDim;
  a.backend = Backend::Unfused;
  LayerTensors layer;
  layer.inputs.format = format;
  layer.inputs.q = layer.inputs.k = k.on_gpu();
  layer.inputs.v = v.on_gpu();
  layer.out = out.gpu->view();
  GraphedStep graph(Attention(a, twins.gpu.config()), twins.gpu, maxima, {&layer, 1});
  LayerInputs inputs = layer.inputs;
  inputs.k = k.on_host();
  inputs.v = v.on_host();
  std::vector<SequenceStep> lines;
  for (SequenceId id = 0; id < 39; ++id) lines.push_back({id, 4});
  for (const auto& step : {lines, {{3, 1}, {2, 0}, {38, 1}}, {{39, 2}}}) {
    const auto [host_plan, gpu_plan] = twins.step(step);
    Attention(a, twins.host.config()).append(host_plan, twins.host, 0, inputs);
    graph.replay(gpu_plan);
    testkit::synchronize(kGpu);
    EXPECT_TRUE(twins.same_storage()) << to_string(format) << ", " << step.size() << " sequences";
  }
}

TEST_F(GpuTest, PaddingOfAGraphForMoreTokensThanTheCacheHoldsWritesNothing) {
  expect_padding_to_write_nothing(TensorFormat::Thd);
  expect_padding_to_write_nothing(TensorFormat::Bshd);
}

/// An eager prompt leaves places of tokens far behind what the graph's sbhd tensors hold. A load
/// from there shows under compute-sanitizer (tools/gpu_pack_run.sh); flash2 is what Auto takes, and
/// has no kernels but its own.
TEST_F(GpuTest, AReplayGoesByNoPlaceThatAnEarlierStepLeft) {
  require_backend(Backend::Flash2);
  Twins twins(config_of({.max_seq_len = 4'000}));
  twins.poison();
  AttentionConfig a;
  a.num_q_heads = a.num_kv_heads = kHeads;
  a.head_dim = kDim;
  const TwinTensor prompt(DType::F16, {3'000, kHeads, kDim}, 4);
  const auto [host_prompt, gpu_prompt] = twins.step({{0, 3'000}});
  LayerInputs inputs;
  inputs.k = inputs.v = prompt.on_host();
  Attention(a, twins.host.config()).append(host_prompt, twins.host, 0, inputs);
  inputs.k = inputs.v = prompt.on_gpu();
  Attention(a, twins.gpu.config()).append(gpu_prompt, twins.gpu, 0, inputs);

  const StepMaxima maxima{
      .num_seqs = 40, .num_tokens = 160, .max_new_tokens = 4, .max_kv_len = 4'000};
  const TwinTensor k(DType::F16, {4, 40, kHeads, kDim}, 5);
  const TwinTensor out(DType::F16, {4, 40, kHeads, kDim}, 6);
  LayerTensors layer;
  layer.inputs.format = TensorFormat::Sbhd;
  layer.inputs.q = layer.inputs.k = layer.inputs.v = k.on_gpu();
  layer.out = out.gpu->view();
  GraphedStep graph(Attention(a, twins.gpu.config()), twins.gpu, maxima, {&layer, 1});
  LayerInputs host_inputs = layer.inputs;
  host_inputs.k = host_inputs.v = k.on_host();
  const auto [host_plan, gpu_plan] = twins.step({{0, 1}, {1, 2}});
  Attention(a, twins.host.config()).append(host_plan, twins.host, 0, host_inputs);
  graph.replay(gpu_plan);
  testkit::synchronize(kGpu);
  EXPECT_TRUE(twins.same_storage());
}

}  // namespace
}  // namespace octavo::gpu_tests
