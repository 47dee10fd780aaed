// SPDX-License-Identifier: Apache-2.0
// The life of plans: begun, undone, overtaken; what a steady state allocates; what a cache weighs.
#include <gtest/gtest.h>
#include <octavo/octavo.h>

#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "refusal/expect.h"

namespace {
std::size_t num_allocations = 0;
}

// ThreadSanitizer brings its own operator new, statically where clang links it.
#if defined(__has_feature)
#define OCTAVO_COUNTS_ALLOCATIONS !__has_feature(thread_sanitizer)
#else
#define OCTAVO_COUNTS_ALLOCATIONS 1
#endif

#if OCTAVO_COUNTS_ALLOCATIONS
// Counts what the library takes from the heap in this test program.
void* operator new(std::size_t num_bytes) {
  ++num_allocations;
  if (void* block = std::malloc(num_bytes)) return block;
  throw std::bad_alloc();
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t /*num_bytes*/) noexcept { std::free(block); }
#endif

namespace octavo {
namespace {

CacheConfig small_config() {
  CacheConfig config;
  config.num_layers = 2;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.max_num_seqs = 4;
  config.max_seq_len = 64;
  config.page_size = 4;
  config.num_pages = 24;
  return config;
}

TEST(KvCache, BeginsAPlanOnlyAtItsOwnVersion) {
  KvCache cache(small_config());
  const PlanOutcome outcome = cache.plan({{1, 5}});
  cache.release(1);
  EXPECT_EQ(
      "plan: wanted the cache's version, 2, got version 1 (the cache changed "
      "since: plan again)",
      refusal::message_of([&] { cache.begin(outcome.plan()); }));
}

TEST(KvCache, BeginsAPlanOnce) {
  KvCache cache(small_config());
  const PlanOutcome outcome = cache.plan({{1, 5}});
  cache.begin(outcome.plan());
  EXPECT_EQ("plan: wanted one that was not begun, got one that was",
            refusal::message_of([&] { cache.begin(outcome.plan()); }));
}

TEST(KvCache, UndoesThePlanBeforeBeginOnly) {
  KvCache cache(small_config());
  const PlanOutcome outcome = cache.plan({{1, 5}});
  cache.begin(outcome.plan());
  EXPECT_EQ("plan: wanted one that was not begun, got one that was",
            refusal::message_of([&] { cache.undo(outcome.plan()); }));
  EXPECT_EQ(5, cache.length(1));
}

TEST(KvCache, UndoesAPlanOnce) {
  KvCache cache(small_config());
  const PlanOutcome outcome = cache.plan({{1, 5}});
  cache.undo(outcome.plan());
  EXPECT_FALSE(cache.contains(1));
  EXPECT_EQ(
      "plan: wanted the cache's version, 2, got version 1 (the cache changed "
      "since: plan again)",
      refusal::message_of([&] { cache.undo(outcome.plan()); }));
}

TEST(KvCache, RefusesAnothersPlan) {
  KvCache cache(small_config());
  KvCache other(small_config());
  const PlanOutcome outcome = other.plan({{1, 5}});
  EXPECT_EQ("plan: wanted a plan of this cache, got another cache's",
            refusal::message_of([&] { cache.begin(outcome.plan()); }));
  EXPECT_EQ("plan: wanted a plan of this cache, got an empty one",
            refusal::message_of([&] { cache.begin(StepPlan()); }));
}

TEST(KvCache, TakesNoHeapMemoryInSteadyState) {
  if (!OCTAVO_COUNTS_ALLOCATIONS) GTEST_SKIP() << "ThreadSanitizer has its own operator new";
  KvCache cache(small_config());
  const auto step = [&cache](std::int64_t round) {
    const SequenceStep lines[] = {{round, 3}, {round + 1, 1}};
    {
      const PlanOutcome outcome = cache.plan(lines);
      cache.begin(outcome.plan());
    }
    EXPECT_TRUE(cache.fork(round, round + 1000).ok());
    const SequenceStep more[] = {{round + 1000, 1}, {round, 1}};
    {
      const PlanOutcome outcome = cache.plan(more);
      cache.begin(outcome.plan());
    }
    cache.truncate(round + 1000, 1);
    cache.release(round + 1000);
    cache.release(round);
  };
  for (std::int64_t round = 0; round < 8; ++round) step(round);
  const std::size_t before = num_allocations;
  for (std::int64_t round = 8; round < 400; ++round) step(round);
  EXPECT_EQ(before, num_allocations);
}

TEST(KvCache, WeighsWhatItsSlotsNeed) {
  CacheConfig config = small_config();
  config.head_dim_v = 3;
  config.dtype = DType::BF16;
  const KvCache cache(config);
  EXPECT_EQ(std::int64_t{2} * 24 * 4 * 2 * (8 + 3) * 2, cache.stats().bytes);
}

TEST(KvCache, CountsSharedSlotsOnce) {
  KvCache cache(small_config());
  cache.begin(cache.plan({{1, 6}}).plan());
  EXPECT_TRUE(cache.fork(1, 2).ok());
  cache.truncate(2, 5);
  const CacheStats stats = cache.stats();
  EXPECT_EQ(2, stats.num_seqs);
  EXPECT_EQ(11, stats.num_tokens);
  EXPECT_EQ(2, stats.pages_used);
  EXPECT_EQ(2, stats.pages_shared);
  EXPECT_EQ(22, stats.pages_free);
  EXPECT_EQ(8, stats.slots_used);
  EXPECT_EQ(2, stats.slots_wasted);
}

TEST(KvCache, AContiguousForkWorksWithEveryRowInUse) {
  CacheConfig config = small_config();
  config.kind = CacheKind::Contiguous;
  config.max_num_seqs = 2;
  KvCache cache(config);
  cache.begin(cache.plan({{1, 6}}).plan());
  EXPECT_TRUE(cache.fork(1, 2).ok());
  const ForkOutcome full = cache.fork(1, 3);
  ASSERT_FALSE(full.ok());
  EXPECT_EQ("sequences: wanted room for 1 more, got 0 (release one)", full.shortage().to_string());
  cache.release(1);
  EXPECT_TRUE(cache.plan({{3, 1}, {2, 1}}).ok());  // before the fork's rows were copied
}

TEST(KvCache, TruncationToNothingKeepsTheSequenceAlive) {
  KvCache cache(small_config());
  cache.begin(cache.plan({{1, 6}}).plan());
  cache.truncate(1, 0);
  EXPECT_TRUE(cache.contains(1));
  EXPECT_EQ(0, cache.stats().pages_used);
}

TEST(KvCache, AnEmptyStepIsAStep) {
  KvCache cache(small_config());
  cache.begin(cache.plan(std::span<const SequenceStep>()).plan());
  EXPECT_EQ(1U, cache.version());
}

TEST(KvCache, KeepsPagesOfFinishedSequencesFromNobody) {
  KvCache cache(small_config());
  for (SequenceId id = 0; id < 100; ++id) {
    cache.begin(cache.plan({{id, 64}}).plan());
    cache.release(id);
  }
  EXPECT_EQ(24, cache.stats().pages_free);
  cache.audit();
}

}  // namespace
}  // namespace octavo
