// SPDX-License-Identifier: Apache-2.0
// Forks, cuts and taken-back plans seen from the numbers: the storage and the outputs of those who
// had no part in it stay as they are.
#include "testing/host_tensor.h"
#include "testing/random.h"
#include "tests/conformance/suite.h"

#include <octavo/attention.h>
#include <octavo/cache.h>

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

namespace octavo::conformance {
namespace {

using ::testing::Combine;
using ::testing::TestWithParam;
using ::testing::Values;
using ::testing::ValuesIn;
using testkit::HostTensor;

constexpr std::int32_t kHeads = 2;
constexpr std::int32_t kDim = 8;

// A small cache and a counter of tokens: the n-th token ever brought has numbers of its own.
class Sequences {
 public:
  Sequences(Backend backend, CacheKind kind) : cache_(cache_config(kind)) {
    AttentionConfig config;
    config.num_q_heads = 4;
    config.num_kv_heads = kHeads;
    config.head_dim = kDim;
    config.backend = backend;
    attention_.emplace(config, cache_.config());
  }

  KvCache& cache() { return cache_; }

  // One sequence's step with tokens seeded by `seed`; its output.
  HostTensor step(SequenceId id, std::int64_t tokens, std::uint64_t seed) {
    const PlanOutcome outcome = cache_.plan({{id, tokens}});
    cache_.begin(outcome.plan());
    testkit::Random random(seed);
    HostTensor q(DType::F32, {tokens, 4, kDim});
    HostTensor k(DType::F32, {tokens, kHeads, kDim});
    HostTensor v(DType::F32, {tokens, kHeads, kDim});
    for (HostTensor* tensor : {&q, &k, &v}) random.fill_normal(*tensor);
    HostTensor out(DType::F32, {tokens, 4, kDim});
    LayerInputs inputs;
    inputs.q = q.view();
    inputs.k = k.view();
    inputs.v = v.view();
    attention_->forward(outcome.plan(), cache_, 0, inputs, out.view());
    return out;
  }

  // K and V of a sequence, position by position.
  std::vector<float> stored(SequenceId id) {
    std::vector<float> numbers;
    for (const TensorView& view : {cache_.key_storage(0), cache_.value_storage(0)}) {
      const std::int64_t slots = view.shape[1];
      const std::vector<std::int32_t> pages = cache_.page_ids(id);
      for (std::int64_t pos = 0; pos < cache_.length(id); ++pos) {
        const std::int64_t page = pages[static_cast<std::size_t>(pos / slots)];
        const auto* row = static_cast<const float*>(view.data) + page * view.strides[0] +
                          pos % slots * view.strides[1];
        numbers.insert(numbers.end(), row, row + kHeads * kDim);
      }
    }
    return numbers;
  }

 private:
  static CacheConfig cache_config(CacheKind kind) {
    CacheConfig config;
    config.kind = kind;
    config.num_kv_heads = kHeads;
    config.head_dim = kDim;
    config.max_num_seqs = 4;
    config.max_seq_len = 64;
    config.page_size = 8;
    config.num_pages = 20;
    return config;
  }

  KvCache cache_;
  std::optional<Attention> attention_;
};

class Life : public TestWithParam<std::tuple<Backend, CacheKind>> {
 protected:
  Sequences fresh() const { return {std::get<0>(GetParam()), std::get<1>(GetParam())}; }
};

TEST_P(Life, AForksWritesLeaveItsSourceAlone) {
  Sequences seqs = fresh();
  seqs.step(0, 21, 1);
  const std::vector<float> before = seqs.stored(0);
  ASSERT_TRUE(seqs.cache().fork(0, 1).ok());
  seqs.step(1, 5, 2);
  EXPECT_EQ(seqs.stored(0), before);
}

TEST_P(Life, ASourcesWritesLeaveItsForkAlone) {
  Sequences seqs = fresh();
  seqs.step(0, 21, 1);
  const std::vector<float> before = seqs.stored(0);
  ASSERT_TRUE(seqs.cache().fork(0, 1).ok());
  seqs.step(0, 5, 2);
  EXPECT_EQ(seqs.stored(1), before);
}

TEST_P(Life, AForkAttendsAsItsSourceWould) {
  Sequences seqs = fresh();
  seqs.step(0, 21, 1);
  ASSERT_TRUE(seqs.cache().fork(0, 1).ok());
  const HostTensor of_fork = seqs.step(1, 3, 2);
  const HostTensor of_source = seqs.step(0, 3, 2);
  EXPECT_TRUE(of_fork == of_source);
}

TEST_P(Life, AForkOutlivesItsSource) {
  Sequences seqs = fresh();
  seqs.step(0, 21, 1);
  ASSERT_TRUE(seqs.cache().fork(0, 1).ok());
  seqs.step(1, 0, 2);
  const std::vector<float> before = seqs.stored(1);
  seqs.cache().release(0);
  seqs.step(2, 30, 3);
  EXPECT_EQ(seqs.stored(1), before);
}

// The copy of a contiguous fork waits for the next begin; the source may be gone by then.
TEST_P(Life, AForkSurvivesTheCutOfItsSourceBeforeAnyStep) {
  Sequences seqs = fresh();
  seqs.step(0, 21, 1);
  const std::vector<float> before = seqs.stored(0);
  ASSERT_TRUE(seqs.cache().fork(0, 1).ok());
  seqs.cache().truncate(0, 2);
  seqs.step(0, 9, 2);
  EXPECT_EQ(seqs.stored(1), before);
}

TEST_P(Life, AForkSurvivesTheReleaseOfItsSourceBeforeAnyStep) {
  Sequences seqs = fresh();
  seqs.step(0, 21, 1);
  const std::vector<float> before = seqs.stored(0);
  ASSERT_TRUE(seqs.cache().fork(0, 1).ok());
  seqs.cache().release(0);
  seqs.step(2, 30, 2);
  EXPECT_EQ(seqs.stored(1), before);
}

TEST_P(Life, CutAndGrownAgainEqualsGrownDirectly) {
  Sequences cut = fresh();
  cut.step(0, 20, 1);
  cut.step(0, 10, 2);
  cut.cache().truncate(0, 20);
  const HostTensor after_cut = cut.step(0, 11, 3);
  Sequences direct = fresh();
  direct.step(0, 20, 1);
  const HostTensor directly = direct.step(0, 11, 3);
  EXPECT_TRUE(after_cut == directly);
  EXPECT_EQ(cut.stored(0), direct.stored(0));
}

TEST_P(Life, ACutToNothingStartsAnew) {
  Sequences cut = fresh();
  cut.step(0, 20, 1);
  cut.cache().truncate(0, 0);
  EXPECT_TRUE(cut.cache().contains(0));
  const HostTensor after_cut = cut.step(0, 11, 3);
  Sequences direct = fresh();
  EXPECT_TRUE(after_cut == direct.step(0, 11, 3));
}

TEST_P(Life, APauseChangesNothing) {
  Sequences paused = fresh();
  paused.step(0, 20, 1);
  paused.step(1, 17, 5);
  paused.step(2, 30, 6);
  paused.cache().release(1);
  const HostTensor after_pause = paused.step(0, 2, 3);
  Sequences direct = fresh();
  direct.step(0, 20, 1);
  EXPECT_TRUE(after_pause == direct.step(0, 2, 3));
}

TEST_P(Life, AnUndonePlanChangesNothing) {
  Sequences undone = fresh();
  undone.step(0, 20, 1);
  ASSERT_TRUE(undone.cache().fork(0, 1).ok());
  const PlanOutcome outcome = undone.cache().plan({{1, 7}, {0, 9}, {3, 2}});
  ASSERT_TRUE(outcome.ok());
  undone.cache().undo(outcome.plan());
  undone.cache().audit();
  EXPECT_EQ(undone.cache().length(0), 20);
  EXPECT_FALSE(undone.cache().contains(3));
  const HostTensor of_fork = undone.step(1, 7, 3);
  const HostTensor of_source = undone.step(0, 7, 3);
  Sequences direct = fresh();
  direct.step(0, 20, 1);
  const HostTensor directly = direct.step(0, 7, 3);
  EXPECT_TRUE(of_source == directly);
  EXPECT_TRUE(of_fork == directly);
}

// Libraries multiply masked values by 0, which NaN survives: what a step enters it clears.
TEST_P(Life, AStepClearsTheSlotsBehindItsEnd) {
  Sequences seqs = fresh();
  for (const TensorView& view : {seqs.cache().key_storage(0), seqs.cache().value_storage(0)}) {
    testkit::poison(DType::F32, view.data, 0, view.shape[0] * view.strides[0]);
  }
  seqs.step(0, 21, 1);
  const std::int32_t page = seqs.cache().page_ids(0).back();
  const std::int64_t first = seqs.cache().config().kind == CacheKind::Paged ? 21 % 8 : 21;
  for (const TensorView& view : {seqs.cache().key_storage(0), seqs.cache().value_storage(0)}) {
    const auto* slot =
        static_cast<const float*>(view.data) + page * view.strides[0] + first * view.strides[1];
    EXPECT_EQ(std::vector<float>(slot, slot + kHeads * kDim),
              std::vector<float>(std::size_t{kHeads} * kDim));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Life,
                         Combine(ValuesIn(usable_backends()),
                                 Values(CacheKind::Paged, CacheKind::Contiguous)));

}  // namespace
}  // namespace octavo::conformance
