// SPDX-License-Identifier: Apache-2.0
// Conversions on the host, and a cache in memory that the caller lays out.
#include <octavo/attention.h>
#include <octavo/cache.h>
#include <octavo/convert.h>
#include <octavo/error.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace octavo {
namespace {

// Rows 0, 1, 2 … of one head of one element.
std::vector<float> counted(std::size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), 1.0F);
  return values;
}

const std::vector<std::int32_t> kOffsets = {0, 2, 2, 5};
const StepArrays kStep{.num_seqs = 3, .num_tokens = 5, .token_offsets = kOffsets.data()};

TEST(ConvertTokens, PadsARaggedTensorWithZeros) {
  std::vector<float> from = counted(5);
  std::vector<float> to(9, -1.0F);
  convert_tokens(ConstTensorView(from.data(), DType::F32, {5, 1, 1}), TensorFormat::Thd,
                 TensorView(to.data(), DType::F32, {3, 3, 1, 1}), TensorFormat::Bshd, kStep);
  EXPECT_EQ(to, (std::vector<float>{1, 2, 0, 0, 0, 0, 3, 4, 5}));
}

TEST(ConvertTokens, TakesTokensBeforeSequencesToo) {
  std::vector<float> from = counted(9);  // [3 tokens, 3 sequences]
  std::vector<float> to(6, -1.0F);
  convert_tokens(ConstTensorView(from.data(), DType::F32, {3, 3, 1, 1}), TensorFormat::Sbhd,
                 TensorView(to.data(), DType::F32, {6, 1, 1}), TensorFormat::Thd, kStep);
  EXPECT_EQ(to, (std::vector<float>{1, 4, 3, 6, 9, 0}));
}

TEST(ConvertTokens, NamesOffsetsThatFall) {
  const std::vector<std::int32_t> falling = {0, 3, 2, 5};
  StepArrays step = kStep;
  step.token_offsets = falling.data();
  std::vector<float> values(9);
  const TensorView view(values.data(), DType::F32, {9, 1, 1});
  try {
    convert_tokens(view, TensorFormat::Thd, view, TensorFormat::Thd, step);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "step.token_offsets[2]: wanted at least 3, got 2 (prefix sums don't fall)");
  }
}

CacheConfig small() {
  CacheConfig c;
  c.num_kv_heads = 2;
  c.head_dim = 3;
  c.max_num_seqs = 3;
  c.max_seq_len = 10;
  c.page_size = 4;
  return c;
}

AttentionConfig attention() {
  AttentionConfig a;
  a.num_q_heads = a.num_kv_heads = 2;
  a.head_dim = 3;
  return a;
}

// Appends 6 tokens of sequence 1, forks it, appends one more to both, and gathers all keys.
std::vector<float> gathered_keys(KvCache& cache) {
  const Attention layer(attention(), cache.config());
  LayerInputs inputs;
  std::vector<float> first = counted(36);
  inputs.k = inputs.v = ConstTensorView(first.data(), DType::F32, {6, 2, 3});
  StepPlan plan = cache.plan({{1, 6}}).plan();
  cache.begin(plan);
  layer.append(plan, cache, 0, inputs);
  EXPECT_TRUE(cache.fork(1, 2).ok());
  std::vector<float> second(12, -5.0F);
  second[0] = -7.0F;
  inputs.k = inputs.v = ConstTensorView(second.data(), DType::F32, {2, 2, 3});
  plan = cache.plan({{2, 1}, {1, 1}}).plan();
  cache.begin(plan);
  layer.append(plan, cache, 0, inputs);
  std::vector<float> keys(2 * 8 * 6, -1.0F);
  std::vector<float> values = keys;
  gather_cache(plan, cache, 0, TensorView(keys.data(), DType::F32, {2, 8, 2, 3}),
               TensorView(values.data(), DType::F32, {2, 8, 2, 3}));
  EXPECT_EQ(keys, values);
  return keys;
}

TEST(GatherCache, GivesEachSequencesTokensInOrder) {
  KvCache cache(small());
  const std::vector<float> keys = gathered_keys(cache);
  for (std::size_t i = 0; i < 36; ++i) {
    EXPECT_EQ(keys[i], static_cast<float>(i + 1));
    EXPECT_EQ(keys[48 + i], static_cast<float>(i + 1));
  }
  EXPECT_EQ(keys[36], -7.0F);
  EXPECT_EQ(keys[48 + 36], -5.0F);
  EXPECT_EQ(keys[42], 0.0F);  // behind the end
}

TEST(CallersMemory, MayBeHeadMajorAndInterleaved) {
  CacheConfig config = small();
  KvCache ours(config);
  // [page, K or V, head, slot, dim], 9 pages.
  std::vector<float> memory(9 * 2 * 2 * 4 * 3, 77.0F);
  config.num_pages = 9;
  config.keys = TensorView(memory.data(), DType::F32, {1, 9, 4, 2, 3});
  config.keys.strides = {9 * 48, 48, 3, 12, 1};
  config.values = config.keys;
  config.values.data = memory.data() + 24;
  KvCache theirs(config);
  EXPECT_EQ(gathered_keys(theirs), gathered_keys(ours));
  EXPECT_EQ(theirs.stats().bytes, 0);
}

TEST(CacheSizes, SayWhatACacheTakes) {
  const CacheSizes sizes = cache_sizes(small());
  EXPECT_EQ(sizes.keys, 9 * 4 * 2 * 3 * 4);
  EXPECT_EQ(sizes.values, sizes.keys);
  EXPECT_EQ(sizes.workspace, 0);
}

struct Located {
  std::vector<std::int32_t> rows, kv_lens;
};

Located located(const std::vector<std::int32_t>& seqs, const std::vector<std::int32_t>& positions) {
  // Pages of 4: two sequences of 2 and 1 pages, and one entry of the list that nobody has.
  const std::vector<std::int32_t> page_offsets = {0, 2, 3};
  Located to{seqs, seqs};
  locate_tokens({.seqs = seqs.data(),
                 .positions = positions.data(),
                 .page_offsets = page_offsets.data(),
                 .num_tokens = static_cast<std::int32_t>(seqs.size()),
                 .num_seqs = 2,
                 .num_pages = 4,
                 .page_size = 4},
                to.rows.data(), to.kv_lens.data());
  return to;
}

TEST(LocateTokens, FindsEachTokensEntryAndItsPlaceInThePage) {
  const Located to = located({0, 0, 1, 0}, {3, 4, 0, 7});
  EXPECT_EQ(to.rows, (std::vector<std::int32_t>{0, 1, 2, 1}));
  EXPECT_EQ(to.kv_lens, (std::vector<std::int32_t>{4, 1, 1, 4}));
}

TEST(LocateTokens, GivesNoRowToTokensThatLieNowhere) {
  const std::int32_t most = std::numeric_limits<std::int32_t>::max();
  const Located to = located({-1, 2, 0, 0, 1, 1, most}, {0, 0, -1, 8, 4, most, most});
  EXPECT_EQ(to.rows, std::vector<std::int32_t>(7, -1));
  EXPECT_EQ(to.kv_lens, std::vector<std::int32_t>(7, 1));
}

TEST(LocateTokens, NeverLeavesTheList) {
  const std::vector<std::int32_t> one = {0}, offsets = {-1, 9}, last = {3};
  std::int32_t row = 7, kv_len = 7;
  ListedTokens tokens{.seqs = one.data(),
                      .positions = one.data(),
                      .page_offsets = offsets.data(),
                      .num_tokens = 1,
                      .num_seqs = 1,
                      .num_pages = 3,
                      .page_size = 1};
  locate_tokens(tokens, &row, &kv_len);
  EXPECT_EQ(row, -1);
  const std::vector<std::int32_t> beyond = {0, 9};
  tokens.page_offsets = beyond.data();
  tokens.positions = last.data();
  locate_tokens(tokens, &row, &kv_len);
  EXPECT_EQ(row, -1);
}

TEST(LocateTokens, NamesAnArrayThatIsMissing) {
  const std::vector<std::int32_t> one = {0};
  std::int32_t row = 0, kv_len = 0;
  const ListedTokens tokens{
      .seqs = one.data(), .page_offsets = one.data(), .num_tokens = 1, .page_size = 1};
  try {
    locate_tokens(tokens, &row, &kv_len);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "tokens.positions: wanted a pointer, got null");
  }
}

}  // namespace
}  // namespace octavo
