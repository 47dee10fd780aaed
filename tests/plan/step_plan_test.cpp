// SPDX-License-Identifier: Apache-2.0
// What a plan says of small steps whose pages can be worked out by hand.
#include <gtest/gtest.h>
#include <octavo/error.h>
#include <octavo/plan.h>

#include <vector>

#include "cache/sequence_store.h"
#include "plan/planner.h"

namespace octavo::plan {
namespace {

template <typename ValueT>
std::vector<ValueT> list(std::span<const ValueT> values) {
  return {values.begin(), values.end()};
}

class StepPlanOfPages : public testing::Test {
 protected:
  StepPlan plan(const std::vector<SequenceStep>& step) {
    const PlanOutcome outcome = planner.plan(store, step);
    StepPlan result = outcome.plan();
    return result;
  }
  StepPlan begun(const std::vector<SequenceStep>& step) {
    StepPlan result = plan(step);
    store.commit_reservation();
    return result;
  }

  cache::SequenceStore store{
      {.max_num_seqs = 4, .max_seq_len = 32, .page_size = 4, .num_pages = 12}};
  Planner planner;
};

TEST_F(StepPlanOfPages, KeepsTheCallersOrder) {
  begun({{9, 2}});
  const StepPlan step = begun({{8, 1}, {9, 3}, {17, 0}});
  EXPECT_EQ((std::vector<SequenceId>{8, 9, 17}), list(step.ids()));
  EXPECT_EQ((std::vector<std::int32_t>{0, 1, 4, 4}), list(step.token_offsets()));
  EXPECT_EQ((std::vector<std::int32_t>{0, 2, 0}), list(step.past_lens()));
  EXPECT_EQ((std::vector<std::int32_t>{1, 5, 0}), list(step.kv_lens()));
  EXPECT_EQ(3, step.max_new_tokens());
  EXPECT_EQ(5, step.max_kv_len());
}

TEST_F(StepPlanOfPages, PutsTokensIntoTheirPages) {
  begun({{1, 3}});                                // page 0
  const StepPlan step = begun({{2, 5}, {1, 2}});  // pages 1 and 2, then 3
  EXPECT_EQ(1 * 4 + 0, step.slot(0, 0));
  EXPECT_EQ(2 * 4 + 0, step.slot(0, 4));
  EXPECT_EQ(0 * 4 + 3, step.slot(1, 0));
  EXPECT_EQ(3 * 4 + 0, step.slot(1, 1));
  EXPECT_EQ(4, step.position(1, 1));
}

TEST_F(StepPlanOfPages, ListsOnlyEntriesThatChangedOrAreWritten) {
  begun({{1, 17}});
  const StepPlan inside = begun({{1, 1}});
  EXPECT_EQ((std::vector<std::int32_t>{4}), list(inside.first_entries()));
  EXPECT_EQ((std::vector<std::int32_t>{4}), list(inside.entries()));
  const StepPlan nothing = begun({{1, 0}});
  EXPECT_TRUE(nothing.entries().empty());
}

TEST_F(StepPlanOfPages, CarriesEntriesOfAStepThatWasNeverBegun) {
  plan({{1, 9}});
  const StepPlan step = plan({{1, 1}});
  EXPECT_EQ((std::vector<std::int32_t>{0, 1, 2}), list(step.entries()));
}

TEST_F(StepPlanOfPages, CopiesASharedPageAtTheFirstWrite) {
  begun({{1, 6}});
  EXPECT_EQ(nullptr, store.fork(1, 2));
  const StepPlan step = begun({{2, 1}, {1, 1}});
  // Sequence 2 writes first and gets the copy; sequence 1, then alone, writes in place.
  EXPECT_EQ((std::vector<PageCopy>{{1, 2, 2}}), list(step.copies()));
  EXPECT_EQ(2 * 4 + 2, step.slot(0, 0));
  EXPECT_EQ(1 * 4 + 2, step.slot(1, 0));
}

TEST_F(StepPlanOfPages, CarriesCopiesOfAStepThatWasNeverBegun) {
  begun({{1, 6}});
  EXPECT_EQ(nullptr, store.fork(1, 2));
  plan({{2, 1}});
  EXPECT_EQ((std::vector<PageCopy>{{1, 2, 2}}), list(plan({{2, 1}}).copies()));
}

TEST_F(StepPlanOfPages, FullPagesAreNeverCopied) {
  begun({{1, 8}});
  EXPECT_EQ(nullptr, store.fork(1, 2));
  EXPECT_TRUE(begun({{2, 1}, {1, 1}}).copies().empty());
}

TEST_F(StepPlanOfPages, ClearsTheRestOfANewlyEnteredPage) {
  EXPECT_EQ((std::vector<std::int32_t>{2}), list(begun({{1, 6}}).clear_lens()));
  EXPECT_EQ((std::vector<std::int32_t>{0}), list(begun({{1, 1}}).clear_lens()));
  EXPECT_EQ((std::vector<std::int32_t>{0}), list(begun({{1, 1}}).clear_lens()));
  EXPECT_EQ((std::vector<std::int32_t>{3}), list(begun({{1, 1}}).clear_lens()));
}

TEST_F(StepPlanOfPages, ClearsWhatATruncationLeft) {
  begun({{1, 7}});
  store.truncate(1, 5);
  EXPECT_EQ((std::vector<std::int32_t>{2}), list(begun({{1, 1}}).clear_lens()));
}

TEST_F(StepPlanOfPages, ComparesByContent) {
  const StepPlan first = plan({{1, 5}});
  store.undo_reservation();
  const StepPlan again = plan({{1, 5}});
  EXPECT_EQ(first, again);
  EXPECT_NE(first.version(), again.version());
  EXPECT_FALSE(first == plan({{1, 1}}));
}

TEST_F(StepPlanOfPages, PrintsOneLineForEachSequence) {
  const StepPlan step = plan({{7, 5}, {3, 0}});
  EXPECT_EQ(
      "step: 2 sequences, 5 new tokens (at most 5), longest 5 tokens, page size 4, version 1\n"
      "  [0] sequence 7: row 0, tokens 0 … 4 of the batch, positions 0 … 4, pages[0…] = 0 1, "
      "clears 3 slots\n"
      "  [1] sequence 3: row 1, no new token, length 0\n",
      step.to_string());
}

TEST_F(StepPlanOfPages, SaysWhoHoldsThePages) {
  begun({{1, 30}, {2, 9}});
  const PlanOutcome outcome = planner.plan(store, std::vector<SequenceStep>{{3, 9}});
  ASSERT_FALSE(outcome.ok());
  EXPECT_EQ("pages: wanted 3, got 1 free of 12: sequence 1 holds 8, sequence 2 holds 3",
            outcome.shortage().to_string());
  EXPECT_THROW(static_cast<void>(outcome.plan()), Error);
}

TEST_F(StepPlanOfPages, AFailedPlanLeavesTheNewestOneUndoable) {
  plan({{1, 30}});
  EXPECT_FALSE(planner.plan(store, std::vector<SequenceStep>{{2, 30}}).ok());
  store.undo_reservation();
  EXPECT_EQ(0, store.num_seqs());
  EXPECT_EQ(12, store.pool().num_free());
}

TEST(StepPlan, AnEmptyPlanHasNoTokens) {
  const StepPlan empty;
  EXPECT_EQ(0, empty.num_tokens());
  EXPECT_EQ(0, empty.num_seqs());
  EXPECT_EQ((std::vector<std::int32_t>{0}), list(empty.token_offsets()));
  EXPECT_THROW(static_cast<void>(empty.slot(0, 0)), Error);
}

}  // namespace
}  // namespace octavo::plan
