// SPDX-License-Identifier: Apache-2.0
// How unfused cuts a step: host arithmetic, so that no GPU is needed.
#include "kernels/cuda/unfused/chunks.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <tuple>
#include <vector>

namespace octavo::kernels::cuda {
namespace {

struct Lengths {
  std::vector<std::int32_t> new_tokens;
  std::vector<std::int32_t> kv_lens;
};

UnfusedShape shape() {
  return {.group = 4, .num_kv_heads = 3, .padded_dim = 64, .padded_dim_v = 64, .element_bytes = 2};
}

std::vector<UnfusedChunk> cut(const Lengths& lengths, std::size_t budget,
                              const UnfusedShape& of = shape()) {
  std::vector<std::int32_t> offsets(1, 0);
  for (const std::int32_t n : lengths.new_tokens) offsets.push_back(offsets.back() + n);
  StepBatch batch;
  batch.num_seqs = static_cast<std::int32_t>(lengths.kv_lens.size());
  batch.num_tokens = offsets.back();
  batch.token_offsets = offsets.data();
  batch.kv_lens = lengths.kv_lens.data();
  std::vector<UnfusedChunk> chunks;
  for_each_chunk(of, {.batch = batch}, budget,
                 [&](const UnfusedChunk& chunk) { chunks.push_back(chunk); });
  return chunks;
}

/// Each token of each head is in one chunk, whose keys reach to the last that it sees, and no chunk
/// passes the budget; K and V of a chunk that doesn't gather are those of the one before.
void expect_whole(const Lengths& lengths, std::size_t budget) {
  const std::vector<UnfusedChunk> chunks = cut(lengths, budget);
  std::set<std::tuple<std::int32_t, std::int32_t, std::int32_t>> seen;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const UnfusedChunk& c = chunks[i];
    EXPECT_LE(UnfusedLayout(shape(), c).end, budget);
    EXPECT_EQ(c.num_keys % kKeyStep, 0);
    EXPECT_EQ(c.seen_keys % kKeyStep, 0);
    EXPECT_LE(c.seen_keys, c.num_keys);
    if (!c.gathers) {
      ASSERT_GT(i, 0U);
      const UnfusedChunk& before = chunks[i - 1];
      EXPECT_EQ(std::tie(c.first_seq, c.num_seqs, c.first_head, c.num_heads, c.num_keys),
                std::tie(before.first_seq, before.num_seqs, before.first_head, before.num_heads,
                         before.num_keys));
    }
    for (std::int32_t b = c.first_seq; b < c.first_seq + c.num_seqs; ++b) {
      const auto at = static_cast<std::size_t>(b);
      for (std::int32_t t = c.first_token;
           t < std::min(c.first_token + c.num_tokens, lengths.new_tokens[at]); ++t) {
        EXPECT_GE(c.seen_keys, lengths.kv_lens[at] - lengths.new_tokens[at] + t + 1);
        for (std::int32_t h = c.first_head; h < c.first_head + c.num_heads; ++h) {
          EXPECT_TRUE(seen.insert({b, t, h}).second) << "twice";
        }
      }
    }
  }
  const std::int32_t tokens =
      std::accumulate(lengths.new_tokens.begin(), lengths.new_tokens.end(), 0);
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(tokens) * 3);
}

const Lengths kMixed = {{1, 1, 0, 300, 1, 0, 2, 64}, {900, 870, 5, 300, 0, 0, 1000, 65}};

TEST(UnfusedChunks, CoverAStepOnce) { expect_whole(kMixed, std::size_t{64} << 20U); }

TEST(UnfusedChunks, CoverAStepOnceInTheLeastWorkspace) {
  expect_whole(kMixed, least_chunk_bytes(shape(), 1000));
}

TEST(UnfusedChunks, AreOneForADecodeStepOfLikeLengths) {
  const Lengths decode = {std::vector<std::int32_t>(64, 1), std::vector<std::int32_t>(64, 1000)};
  EXPECT_EQ(cut(decode, std::size_t{256} << 20U).size(), 1U);
}

TEST(UnfusedChunks, PadNoShortSequenceToALongOne) {
  const Lengths unlike = {{1, 1}, {100, 100'000}};
  const std::vector<UnfusedChunk> chunks = cut(unlike, std::size_t{256} << 20U);
  ASSERT_EQ(chunks.size(), 2U);
  EXPECT_EQ(chunks[0].num_keys, 128);
}

TEST(UnfusedChunks, SeeNoMoreThanACausalTokenMay) {
  const std::vector<UnfusedChunk> chunks = cut({{8192}, {8192}}, std::size_t{64} << 20U);
  ASSERT_GT(chunks.size(), 4U);
  EXPECT_LT(chunks.front().seen_keys, 8192 / 2);
  EXPECT_EQ(chunks.back().seen_keys, 8192);
}

TEST(UnfusedChunks, OfAPromptAreAlikeAndWholeTiles) {
  UnfusedShape full = shape();
  full.causal = false;
  const std::vector<UnfusedChunk> chunks = cut({{8192}, {8192}}, std::size_t{224} << 20U, full);
  ASSERT_GT(chunks.size(), 1U);
  EXPECT_EQ(chunks.front().num_heads, 1);
  EXPECT_GE(chunks.front().num_tokens, 1024);
  for (const UnfusedChunk& chunk : chunks) {
    EXPECT_EQ(chunk.num_tokens % 64, 0);
    EXPECT_LE(chunk.num_tokens, chunks.front().num_tokens);
    EXPECT_GE(chunk.num_tokens, chunks.front().num_tokens / 2);
  }
}

TEST(UnfusedChunks, OfACausalPromptMultiplyFewPairsThatNobodySees) {
  double pairs = 0.0;
  for (const UnfusedChunk& c : cut({{8192}, {8192}}, std::size_t{224} << 20U))
    pairs += static_cast<double>(c.num_heads) * c.num_tokens * static_cast<double>(c.seen_keys);
  EXPECT_LT(pairs, 0.54 * 3 * 8192 * 8192);
}

// 256 rows of 4 heads are 64 tokens; these are no multiples of it.
TEST(UnfusedChunks, OfAStepThatFitsAreOne) {
  EXPECT_EQ(cut({{1000}, {1000}}, std::size_t{256} << 20U).size(), 1U);
  EXPECT_EQ(cut({{65}, {65}}, std::size_t{256} << 20U).size(), 1U);
  EXPECT_EQ(cut({{100, 100}, {300, 300}}, std::size_t{256} << 20U).size(), 1U);
}

}  // namespace
}  // namespace octavo::kernels::cuda
