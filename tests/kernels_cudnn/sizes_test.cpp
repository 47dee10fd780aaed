// SPDX-License-Identifier: Apache-2.0
// From a call to the graph that serves it.
#include "kernels/cudnn/sizes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

namespace octavo::kernels::fused {
namespace {

constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kDim = 128;

AttendParams paged(std::int32_t page_size, const std::int32_t* table) {
  AttendParams params;
  params.kv.dtype = DType::BF16;
  params.kv.page_size = page_size;
  params.kv.num_pages = 1000;
  params.kv.k.slot_stride = kHeads * kDim;
  params.kv.k.head_stride = kDim;
  params.kv.k.page_stride = page_size * kHeads * kDim;
  params.kv.v = params.kv.k;
  params.batch.page_table = table;
  params.batch.page_table_stride = 64;
  params.num_q_heads = 32;
  params.num_kv_heads = kHeads;
  params.head_dim = params.head_dim_v = kDim;
  params.q_layout.token_stride = 32 * kDim;
  params.q_layout.head_stride = kDim;
  params.q_layout.num_token_rows = 1 << 20;
  params.out_layout = params.q_layout;
  return params;
}

const std::int32_t kTable[1] = {0};

TEST(FusedSizes, BucketsAreFourAnOctaveAndExactBelowNine) {
  EXPECT_EQ(bucket(0), 1);
  EXPECT_EQ(bucket(7), 7);
  EXPECT_EQ(bucket(9), 10);
  EXPECT_EQ(bucket(33), 40);
  EXPECT_EQ(bucket(64), 64);
  EXPECT_EQ(bucket(65), 80);
}

TEST(FusedSizes, CutsPagesIntoPowersOfTwo) {
  struct Cut {
    std::int32_t page_size, slots, per_page, ratio;
  };
  for (const Cut& cut : {Cut{1, 1, 1, 1}, Cut{3, 1, 3, 3}, Cut{16, 16, 1, 1}, Cut{24, 8, 3, 3},
                         Cut{64, 64, 1, 1}, Cut{256, 64, 4, 4}, Cut{96, 32, 3, 3}}) {
    const AttendParams params = paged(cut.page_size, kTable);
    const PageCut got = cut_pages(params.kv);
    EXPECT_EQ(got.slots, cut.slots) << cut.page_size;
    EXPECT_EQ(got.per_page, cut.per_page) << cut.page_size;
    EXPECT_EQ(got.k_ratio, cut.ratio) << cut.page_size;
  }
}

TEST(FusedSizes, CutsPagesThatLieApart) {
  AttendParams params = paged(24, kTable);
  params.kv.k.page_stride *= 2;
  const PageCut cut = cut_pages(params.kv);
  EXPECT_EQ(cut.slots, 8);
  EXPECT_EQ(cut.k_ratio, 6);
  EXPECT_EQ(cut.v_ratio, 3);
}

TEST(FusedSizes, RefusesPagesAFractionOfASlotApart) {
  AttendParams params = paged(24, kTable);
  EXPECT_TRUE(can_cut(params.kv));
  params.kv.v.page_stride += 8;
  EXPECT_FALSE(can_cut(params.kv));
}

// Another tensor may lie there, and its NaN would come through the mask.
TEST(FusedSizes, ReachesIntoNothingBehindAContiguousRow) {
  AttendParams params = paged(1000, nullptr);
  EXPECT_EQ(cut_pages(params.kv).slots, 8);
  params.kv.k.page_stride = params.kv.v.page_stride = 1024 * kHeads * kDim;
  EXPECT_EQ(cut_pages(params.kv).slots, 8);
  EXPECT_EQ(cut_pages(params.kv).per_page, 125);
}

TEST(FusedSizes, TableCoversWholeTilesOfKeys) {
  const AttendParams params = paged(16, kTable);
  const CallShape shape = call_shape(params, {2, 600, 300, 257}, kMaxTokensAsRows);
  EXPECT_EQ(shape.key.kv_len % 256, 0);
  EXPECT_GE(shape.key.kv_len, 257);
  EXPECT_EQ(shape.key.page_size, 16);
}

TEST(FusedSizes, FewTokensBecomeBatchRows) {
  const AttendParams params = paged(16, kTable);
  const CallShape few = call_shape(params, {10, 20, 4, 257}, kMaxTokensAsRows);
  EXPECT_EQ(few.rows, BatchRows::Tokens);
  EXPECT_FALSE(few.key.ragged);
  EXPECT_FALSE(few.key.causal);
  EXPECT_EQ(few.key.q_len, 1);
  EXPECT_EQ(few.key.num_seqs, 20);
  const CallShape many = call_shape(params, {10, 50, 5, 257}, kMaxTokensAsRows);
  EXPECT_EQ(many.rows, BatchRows::Sequences);
  EXPECT_TRUE(many.key.ragged);
}

TEST(FusedSizes, NeverHasMoreRowsThanTheTensors) {
  AttendParams params = paged(16, kTable);
  params.q_layout.num_token_rows = params.out_layout.num_token_rows = 33;
  EXPECT_EQ(call_shape(params, {33, 33, 1, 257}, kMaxTokensAsRows).key.num_seqs, 33);
}

TEST(FusedSizes, NearbySizesShareAGraph) {
  const AttendParams params = paged(16, kTable);
  EXPECT_EQ(call_shape(params, {60, 60, 1, 8000}, kMaxTokensAsRows).key,
            call_shape(params, {63, 63, 1, 7500}, kMaxTokensAsRows).key);
}

TEST(FusedSizes, UniformStepsOfABucketNeedNoLengths) {
  AttendParams params = paged(2048, nullptr);
  const Maxima uniform{2, 2048, 1024, 1024, true, true};
  EXPECT_FALSE(call_shape(params, uniform, kMaxTokensAsRows).key.padded);
  const Maxima odd{2, 2000, 1000, 1000, true, true};
  EXPECT_TRUE(call_shape(params, odd, kMaxTokensAsRows).key.padded);
  const Maxima mixed{2, 2048, 1024, 1024, true, false};
  EXPECT_TRUE(call_shape(params, mixed, kMaxTokensAsRows).key.padded);
  params.batch.page_table = kTable;
  EXPECT_TRUE(call_shape(params, uniform, kMaxTokensAsRows).key.padded);
}

TEST(FusedSizes, PagesInOrderNeedNoTable) {
  const AttendParams params = paged(2048, kTable);
  Maxima maxima{2, 2048, 1024, 1024, true, true};
  EXPECT_TRUE(call_shape(params, maxima, kMaxTokensAsRows).key.paged);
  maxima.first_page = 7;
  const CallShape shape = call_shape(params, maxima, kMaxTokensAsRows);
  EXPECT_FALSE(shape.key.paged);
  EXPECT_FALSE(shape.key.padded);
  EXPECT_EQ(shape.first_page, 7);
  maxima.first_page = 998;  // of 1000
  EXPECT_FALSE(call_shape(params, maxima, kMaxTokensAsRows).key.paged);
  maxima.first_page = 999;
  EXPECT_TRUE(call_shape(params, maxima, kMaxTokensAsRows).key.paged);
}

TEST(FusedSizes, TokensAsRowsGoByTheTable) {
  const AttendParams params = paged(2048, kTable);
  Maxima maxima{2, 2, 1, 1024, true, true};
  const GraphKey key = call_shape(params, maxima, kMaxTokensAsRows).key;
  EXPECT_TRUE(key.paged);
  maxima.first_page = 0;
  EXPECT_EQ(call_shape(params, maxima, kMaxTokensAsRows).key, key);
}

// q and out of a padded format: [2, 3] and [2, 5] tokens.
AttendParams unlike_extents() {
  AttendParams params = paged(16, kTable);
  for (TokenLayout* layout : {&params.q_layout, &params.out_layout}) {
    layout->ragged = false;
    layout->num_batch_rows = 2;
    layout->num_token_rows = layout == &params.q_layout ? 3 : 5;
    layout->token_stride = 32 * kDim;
    layout->batch_stride = layout->num_token_rows * 32 * kDim;
  }
  return params;
}

// Row 3 of q would be sequence 1's first token, row 3 of out sequence 0's fourth.
TEST(FusedSizes, RowsOfUnlikeExtentsAreNoBatchRows) {
  const CallShape shape = call_shape(unlike_extents(), {2, 6, 3, 257}, kMaxTokensAsRows);
  EXPECT_EQ(shape.rows, BatchRows::Sequences);
  EXPECT_EQ(shape.key.q_len, 3);
  AttendParams swapped = unlike_extents();
  std::swap(swapped.q_layout, swapped.out_layout);
  EXPECT_EQ(call_shape(swapped, {2, 6, 3, 257}, 8).key.q_len, 3);
  // Sequences that q has and out hasn't are not to be written.
  AttendParams fewer = unlike_extents();
  fewer.q_layout.num_batch_rows = fewer.out_layout.num_batch_rows + 2;
  EXPECT_EQ(call_shape(fewer, {2, 6, 3, 257}, kMaxTokensAsRows).key.num_seqs,
            fewer.out_layout.num_batch_rows);
}

// Of a step that is replayed with sequences in other pages.
Maxima in_any_page(std::int32_t num_seqs, std::int32_t num_tokens, std::int32_t q_len) {
  Maxima maxima{num_seqs, num_tokens, q_len, 1024};
  maxima.one_page_each = true;
  return maxima;
}

TEST(FusedSizes, PagesOfOneSequenceEachAreBatchRows) {
  AttendParams params = paged(2048, kTable);
  params.kv.num_pages = 8;
  const CallShape shape = call_shape(params, in_any_page(2, 600, 300), kMaxTokensAsRows);
  EXPECT_EQ(shape.rows, BatchRows::Pages);
  EXPECT_FALSE(shape.key.paged);
  EXPECT_TRUE(shape.key.padded);
  EXPECT_TRUE(shape.key.ragged);
  EXPECT_EQ(shape.key.num_seqs, 8);
  EXPECT_EQ(shape.first_page, 0);
}

TEST(FusedSizes, PaddedFormatsGoByOffsetsWherePagesAreBatchRows) {
  AttendParams params = paged(2048, kTable);
  params.kv.num_pages = 2;
  params.q_layout.ragged = params.out_layout.ragged = false;
  params.q_layout.num_batch_rows = params.out_layout.num_batch_rows = 2;
  params.q_layout.num_token_rows = params.out_layout.num_token_rows = 300;
  params.q_layout.batch_stride = params.out_layout.batch_stride = kDim * 32 * 300;
  const CallShape shape = call_shape(params, in_any_page(2, 600, 300), kMaxTokensAsRows);
  EXPECT_EQ(shape.rows, BatchRows::Pages);
  EXPECT_TRUE(shape.key.ragged);
  EXPECT_TRUE(shape.stats.packed);
  EXPECT_GE(shape.key.q_len, 300);
}

TEST(FusedSizes, ManyPagesWithoutASequenceGoByTheTable) {
  AttendParams params = paged(2048, kTable);
  params.kv.num_pages = 9;
  const CallShape shape = call_shape(params, in_any_page(2, 600, 300), kMaxTokensAsRows);
  EXPECT_EQ(shape.rows, BatchRows::Sequences);
  EXPECT_TRUE(shape.key.paged);
}

TEST(FusedSizes, ASingleTokenOverASinglePageNeedsNoTable) {
  AttendParams params = paged(2048, kTable);
  params.kv.num_pages = 1;
  const CallShape shape = call_shape(params, in_any_page(1, 1, 1), kMaxTokensAsRows);
  EXPECT_EQ(shape.rows, BatchRows::Tokens);
  EXPECT_FALSE(shape.key.paged);
  EXPECT_TRUE(call_shape(params, in_any_page(1, 2, 2), kMaxTokensAsRows).key.paged);
  params.kv.num_pages = 2;
  EXPECT_TRUE(call_shape(params, in_any_page(1, 1, 1), kMaxTokensAsRows).key.paged);
}

TEST(FusedSizes, WindowsBeyondEveryKeyAreNone) {
  AttendParams params = paged(16, kTable);
  params.window_left = 5000;
  EXPECT_EQ(call_shape(params, {2, 600, 300, 4096}, kMaxTokensAsRows).key.window_left, -1);
  params.window_left = 4000;
  EXPECT_EQ(call_shape(params, {2, 600, 300, 4096}, kMaxTokensAsRows).key.window_left, 4000);
}

TEST(FusedSizes, RowsOfPaddedFormatsLieEvenlyOrNotAtAll) {
  TokenLayout layout;
  layout.ragged = false;
  layout.num_batch_rows = 3;
  layout.num_token_rows = 4;
  layout.token_stride = 100;
  layout.batch_stride = 400;
  EXPECT_EQ(row_stride(layout), 100);
  layout.batch_stride = 500;
  EXPECT_EQ(row_stride(layout), 0);
  layout.batch_stride = 100;
  layout.token_stride = 300;
  EXPECT_EQ(row_stride(layout), 100);
}

}  // namespace
}  // namespace octavo::kernels::fused
