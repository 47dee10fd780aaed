// SPDX-License-Identifier: Apache-2.0
// What a cache refuses: configurations, unknown and repeated ids, plans at the wrong time.
#include "device/gpu.h"
#include "tests/refusal/expect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

namespace octavo::refusal {
namespace {

CacheConfig right() {
  CacheConfig config;
  config.num_layers = 2;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.max_num_seqs = 3;
  config.max_seq_len = 40;
  config.page_size = 4;
  config.num_pages = 12;
  return config;
}

template <typename ChangeT>
std::string construction(ChangeT&& change, ErrorCode code = ErrorCode::InvalidArgument) {
  CacheConfig config = right();
  change(config);
  return message_of([&] { KvCache cache(config); }, code);
}

TEST(CacheConfigRefusal, NamesPageSizeZero) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.page_size = 0; }),
            "page_size: wanted at least 1 and at most 2^31 - 1, got 0");
}

TEST(CacheConfigRefusal, NamesANegativePageSize) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.page_size = -16; }),
            "page_size: wanted at least 1 and at most 2^31 - 1, got -16");
}

TEST(CacheConfigRefusal, NamesNoLayers) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.num_layers = 0; }),
            "num_layers: wanted at least 1 and at most 2^31 - 1, got 0");
}

TEST(CacheConfigRefusal, NamesAHeadDimBeyondTheLargest) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.head_dim = 577; }),
            "head_dim: wanted 1 … 576, got 577");
}

TEST(CacheConfigRefusal, NamesAHeadDimOfZero) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.head_dim = 0; }),
            "head_dim: wanted 1 … 576, got 0");
}

TEST(CacheConfigRefusal, NamesANegativeHeadDimOfV) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.head_dim_v = -1; }),
            "head_dim_v: wanted 1 … 576, got -1");
}

TEST(CacheConfigRefusal, NamesNoHeads) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.num_kv_heads = 0; }),
            "num_kv_heads: wanted at least 1 and at most 2^31 - 1, got 0");
}

TEST(CacheConfigRefusal, NamesNoSequences) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.max_num_seqs = 0; }),
            "max_num_seqs: wanted at least 1 and at most 2^31 - 1, got 0");
}

TEST(CacheConfigRefusal, NamesALengthBeyond32Bits) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.max_seq_len = std::int64_t{1} << 31; }),
            "max_seq_len: wanted at least 1 and at most 2^31 - 1, got 2147483648");
}

TEST(CacheConfigRefusal, NamesNegativePages) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.num_pages = -1; }),
            "num_pages: wanted at least 1 and at most 2^31 - 1, got -1");
}

TEST(CacheConfigRefusal, NamesADtypeThatNoBackendStores) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.dtype = DType::I8; }, ErrorCode::Unsupported),
            "dtype: wanted f32, f16 or bf16, got i8 (no backend stores it yet)");
}

// Also where there is a GPU: none has this index.
TEST(CacheConfigRefusal, NamesADeviceThatIsNotThere) {
  const device::GpuReport& report = device::gpu_report();
  const auto on_gpu = [](CacheConfig& c) { c.device = {DeviceType::Cuda, 99}; };
  if (!report.compiled) {
    EXPECT_EQ(construction(on_gpu, ErrorCode::NotCompiled),
              "device: wanted cpu, got cuda (" + report.why_none + ")");
  } else if (report.gpus.empty()) {
    EXPECT_EQ(construction(on_gpu, ErrorCode::DeviceFailure),
              "device: wanted a GPU, got none (" + report.why_none + ")");
  } else {
    EXPECT_EQ(construction(on_gpu, ErrorCode::InvalidArgument),
              "device.index: wanted 0 … " + std::to_string(report.gpus.size() - 1) + ", got 99");
  }
}

TEST(CacheConfigRefusal, NamesAWorkspaceThatTheCpuDoesNotTake) {
  EXPECT_EQ(construction([](CacheConfig& c) { c.workspace_bytes = 1 << 20; }),
            "workspace_bytes: wanted 0, got 1048576");
}

TEST(CacheConfigRefusal, NamesCallersMemoryOfTheWrongShape) {
  static float memory[4096];
  EXPECT_EQ(construction([](CacheConfig& c) {
              c.keys = TensorView(memory, DType::F32, {1, 1, 1, 1, 1});
            }),
            "values.data: wanted memory for both K and V or for neither, got null");
  EXPECT_THAT(construction([](CacheConfig& c) {
                c.keys = c.values = TensorView(memory, c.dtype, {1, 1, 1, 1, 1});
              }),
              ::testing::HasSubstr("keys.shape: wanted"));
}

TEST(CacheConfigRefusal, NoticesBytesThatOverflow) {
  const std::string message = construction([](CacheConfig& c) {
    c.num_layers = std::numeric_limits<std::int32_t>::max();
    c.num_pages = std::numeric_limits<std::int32_t>::max();
    c.page_size = std::numeric_limits<std::int32_t>::max();
  });
  EXPECT_EQ(message,
            "num_layers * num_pages * page_size * num_kv_heads * head_dim bytes: wanted at most "
            "9223372036854775807, got a product beyond 64 bits");
}

TEST(CacheConfigRefusal, NoticesADefaultOfTooManyPages) {
  const std::string message = construction([](CacheConfig& c) {
    c.max_num_seqs = 1 << 20;
    c.max_seq_len = 1 << 20;
    c.page_size = 1;
    c.num_pages = 0;
  });
  EXPECT_EQ(message,
            "num_pages (max_num_seqs * ceil(max_seq_len / page_size)): wanted at most 2147483647, "
            "got 1099511627776");
}

TEST(CacheConfigRefusal, SaysHowMuchMemoryThereIsNot) {
  // 2^60 bytes fit an int64 and no machine.
  const std::string message = construction(
      [](CacheConfig& c) {
        c.num_layers = 1;
        c.num_kv_heads = 1 << 20;
        c.head_dim = 1;
        c.max_num_seqs = 1;
        c.max_seq_len = 1 << 30;
        c.page_size = 1 << 30;
        c.num_pages = 1 << 8;
      },
      ErrorCode::OutOfMemory);
  EXPECT_NE(message.find("keys: wanted 1152921504606846976 bytes"), std::string::npos) << message;
}

// A cache of two sequences, 0 with 10 tokens and 1 with 5, begun.
class LiveCache : public ::testing::Test {
 protected:
  LiveCache() : cache_(right()), plan_(cache_.plan({{0, 10}, {1, 5}}).plan()) {
    cache_.begin(plan_);
  }

  // The message of a call, which must leave the cache as it is.
  template <typename CallT>
  std::string refused(CallT&& call) {
    const Snapshot before = snapshot_of(cache_);
    const std::string message = message_of(call);
    EXPECT_EQ(snapshot_of(cache_), before);
    cache_.audit();
    return message;
  }

  KvCache cache_;
  StepPlan plan_;
};

TEST_F(LiveCache, RefusesASequenceListedTwice) {
  EXPECT_EQ(refused([&] {
              (void)cache_.plan({{0, 1}, {1, 1}, {0, 1}});
            }),
            "step: wanted each sequence once, got sequence 0 more than once");
}

TEST_F(LiveCache, RefusesANewSequenceListedTwice) {
  EXPECT_EQ(refused([&] {
              (void)cache_.plan({{7, 1}, {7, 1}});
            }),
            "step: wanted each sequence once, got sequence 7 more than once");
}

TEST_F(LiveCache, RefusesANegativeCount) {
  EXPECT_EQ(refused([&] {
              (void)cache_.plan({{0, 1}, {1, -2}});
            }),
            "step[1].new_tokens: wanted 0 … 40 (max_seq_len), got -2");
}

TEST_F(LiveCache, RefusesACountThatNoSequenceCouldHold) {
  EXPECT_EQ(refused([&] {
              (void)cache_.plan({{2, 41}});
            }),
            "step[0].new_tokens: wanted 0 … 40 (max_seq_len), got 41");
}

TEST_F(LiveCache, RefusesTheSmallestCountThereIs) {
  EXPECT_EQ(refused([&] {
              (void)cache_.plan({{0, std::numeric_limits<std::int64_t>::min()}});
            }),
            "step[0].new_tokens: wanted 0 … 40 (max_seq_len), got -9223372036854775808");
}

TEST_F(LiveCache, RefusesToReleaseAnUnknownSequence) {
  EXPECT_EQ(refused([&] { cache_.release(9); }),
            "release: id: wanted the id of a live sequence, got 9");
}

TEST_F(LiveCache, RefusesToReleaseTwice) {
  cache_.release(1);
  EXPECT_EQ(refused([&] { cache_.release(1); }),
            "release: id: wanted the id of a live sequence, got 1");
}

TEST_F(LiveCache, RefusesToForkAnUnknownSequence) {
  EXPECT_EQ(refused([&] { (void)cache_.fork(9, 2); }),
            "fork: from: wanted the id of a live sequence, got 9");
}

TEST_F(LiveCache, RefusesToForkOntoALiveSequence) {
  EXPECT_EQ(refused([&] { (void)cache_.fork(0, 1); }),
            "fork: to: wanted an id that is not alive, got 1");
}

TEST_F(LiveCache, RefusesToForkOntoItself) {
  EXPECT_EQ(refused([&] { (void)cache_.fork(0, 0); }),
            "fork: to: wanted an id that is not alive, got 0");
}

TEST_F(LiveCache, RefusesToTruncateAnUnknownSequence) {
  EXPECT_EQ(refused([&] { cache_.truncate(9, 0); }),
            "truncate: id: wanted the id of a live sequence, got 9");
}

TEST_F(LiveCache, RefusesToTruncateBeyondTheLength) {
  EXPECT_EQ(refused([&] { cache_.truncate(1, 6); }),
            "truncate: length: wanted 0 … 5 (the length of sequence 1), got 6");
}

TEST_F(LiveCache, RefusesToTruncateToANegativeLength) {
  EXPECT_EQ(refused([&] { cache_.truncate(1, -1); }),
            "truncate: length: wanted 0 … 5 (the length of sequence 1), got -1");
}

TEST_F(LiveCache, RefusesTheLengthOfAnUnknownSequence) {
  EXPECT_NE(
      refused([&] { (void)cache_.length(9); }).find("wanted the id of a live sequence, got 9"),
      std::string::npos);
}

TEST_F(LiveCache, RefusesThePagesOfAnUnknownSequence) {
  EXPECT_NE(
      refused([&] { (void)cache_.page_ids(9); }).find("wanted the id of a live sequence, got 9"),
      std::string::npos);
}

TEST_F(LiveCache, RefusesTheStorageOfALayerThatIsNotThere) {
  EXPECT_EQ(refused([&] { (void)cache_.key_storage(2); }), "layer: wanted 0 … 1, got 2");
  EXPECT_EQ(refused([&] { (void)cache_.value_storage(-1); }), "layer: wanted 0 … 1, got -1");
}

TEST_F(LiveCache, RefusesToBeginAPlanTwice) {
  EXPECT_EQ(refused([&] { cache_.begin(plan_); }),
            "plan: wanted one that was not begun, got one that was");
}

TEST_F(LiveCache, RefusesToUndoABegunPlan) {
  EXPECT_EQ(refused([&] { cache_.undo(plan_); }),
            "plan: wanted one that was not begun, got one that was");
}

TEST_F(LiveCache, RefusesToUndoTwice) {
  const StepPlan plan = cache_.plan({{0, 1}}).plan();
  cache_.undo(plan);
  EXPECT_NE(refused([&] { cache_.undo(plan); }).find("plan: wanted the cache's version, "),
            std::string::npos);
}

TEST_F(LiveCache, RefusesToBeginAnUndonePlan) {
  const StepPlan plan = cache_.plan({{0, 1}}).plan();
  cache_.undo(plan);
  EXPECT_NE(refused([&] { cache_.begin(plan); }).find("(the cache changed since: plan again)"),
            std::string::npos);
}

TEST_F(LiveCache, RefusesToBeginAPlanAtAnotherVersion) {
  const StepPlan plan = cache_.plan({{0, 1}}).plan();
  cache_.release(1);
  EXPECT_EQ(refused([&] { cache_.begin(plan); }),
            "plan: wanted the cache's version, " + std::to_string(cache_.version()) +
                ", got version " + std::to_string(plan.version()) +
                " (the cache changed since: plan again)");
}

TEST_F(LiveCache, RefusesToUndoAPlanAtAnotherVersion) {
  const StepPlan plan = cache_.plan({{0, 1}}).plan();
  cache_.truncate(1, 2);
  EXPECT_NE(refused([&] { cache_.undo(plan); }).find("got version"), std::string::npos);
}

TEST_F(LiveCache, RefusesAnOlderPlan) {
  const StepPlan older = cache_.plan({{0, 1}}).plan();
  const StepPlan newer = cache_.plan({{1, 1}}).plan();
  EXPECT_NE(refused([&] { cache_.undo(older); }).find("got version"), std::string::npos);
  cache_.begin(newer);
}

TEST_F(LiveCache, RefusesAnEmptyPlan) {
  EXPECT_EQ(refused([&] { cache_.begin(StepPlan()); }),
            "plan: wanted a plan of this cache, got an empty one");
}

TEST_F(LiveCache, RefusesAnotherCachesPlan) {
  KvCache other(right());
  const StepPlan plan = other.plan({{0, 10}, {1, 5}}).plan();
  EXPECT_EQ(refused([&] { cache_.begin(plan); }),
            "plan: wanted a plan of this cache, got another cache's");
}

TEST_F(LiveCache, GivesBackWhatAPlanThatLacksPagesAskedFor) {
  const Snapshot before = snapshot_of(cache_);
  const PlanOutcome outcome = cache_.plan({{0, 2}, {2, 30}});
  ASSERT_FALSE(outcome.ok());
  EXPECT_EQ(outcome.shortage().pages_wanted, 8);
  EXPECT_EQ(outcome.shortage().pages_free, 7);
  EXPECT_EQ(outcome.shortage().holders.size(), 2U);
  EXPECT_EQ(snapshot_of(cache_), before);
}

TEST_F(LiveCache, GivesBackWhatAPlanOfTooManySequencesAskedFor) {
  const Snapshot before = snapshot_of(cache_);
  const PlanOutcome outcome = cache_.plan({{2, 1}, {3, 1}});
  ASSERT_FALSE(outcome.ok());
  EXPECT_EQ(outcome.shortage().seqs_wanted, 2);
  EXPECT_EQ(outcome.shortage().seqs_free, 1);
  EXPECT_EQ(snapshot_of(cache_), before);
}

TEST_F(LiveCache, SaysWhichSequenceWouldBecomeTooLong) {
  const Snapshot before = snapshot_of(cache_);
  const PlanOutcome outcome = cache_.plan({{1, 1}, {0, 31}});
  ASSERT_FALSE(outcome.ok());
  EXPECT_TRUE(outcome.shortage().too_long);
  EXPECT_EQ(outcome.shortage().longest_id, 0);
  EXPECT_EQ(outcome.shortage().longest_len, 41);
  EXPECT_EQ(snapshot_of(cache_), before);
}

TEST_F(LiveCache, RefusesToTakeAPlanFromAnOutcomeWithoutOne) {
  const PlanOutcome outcome = cache_.plan({{2, 40}});
  EXPECT_NE(message_of([&] { (void)outcome.plan(); }).find("pages: wanted 10, got 7"),
            std::string::npos);
}

TEST_F(LiveCache, RefusesToTakeAShortageFromAnOutcomeWithAPlan) {
  const PlanOutcome outcome = cache_.plan({{0, 1}});
  EXPECT_EQ(message_of([&] { (void)outcome.shortage(); }),
            "shortage: wanted an outcome that failed, got one that succeeded");
}

TEST_F(LiveCache, RefusesSlotsOutsideThePlan) {
  EXPECT_EQ(message_of([&] { (void)plan_.slot(2, 0); }), "seq_idx: wanted 0 … 1, got 2");
  EXPECT_EQ(message_of([&] { (void)plan_.position(1, 5); }), "token_idx: wanted 0 … 4, got 5");
}

}  // namespace
}  // namespace octavo::refusal
