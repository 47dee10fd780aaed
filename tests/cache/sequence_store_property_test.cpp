// SPDX-License-Identifier: Apache-2.0
// Random operations on the sequences, against the naive model.
#include <gtest/gtest.h>

#include <random>

#include "cache/model.h"

namespace octavo::cache_model {
namespace {

struct RandomChoices : Choices {
  RandomChoices(std::uint32_t seed, int num_choices) : engine(seed), left(num_choices) {}
  std::uint32_t below(std::uint32_t bound) override {
    --left;
    return static_cast<std::uint32_t>(engine() % bound);
  }
  [[nodiscard]] bool done() const override { return left <= 0; }

  std::mt19937 engine;
  int left;
};

struct Pool {
  CacheKind kind;
  std::int32_t page_size;
  std::int32_t num_pages;
};

class SequenceStoreModel : public testing::TestWithParam<Pool> {};

TEST_P(SequenceStoreModel, AgreesAfterEveryOperation) {
  constexpr std::uint32_t kNumSeeds = 200;
  constexpr int kNumChoices = 600;
  for (std::uint32_t seed = 0; seed < kNumSeeds; ++seed) {
    Driver driver({.kind = GetParam().kind,
                   .max_num_seqs = 5,
                   .max_seq_len = 24,
                   .page_size = GetParam().page_size,
                   .num_pages = GetParam().num_pages});
    RandomChoices choices(seed, kNumChoices);
    try {
      driver.run(choices);
    } catch (const std::exception& error) {
      FAIL() << "seed " << seed << ": " << error.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Pools, SequenceStoreModel,
    testing::Values(Pool{CacheKind::Paged, 1, 60}, Pool{CacheKind::Paged, 3, 20},
                    Pool{CacheKind::Paged, 4, 12}, Pool{CacheKind::Paged, 16, 10},
                    Pool{CacheKind::Paged, 24, 3}, Pool{CacheKind::Contiguous, 24, 5}));

}  // namespace
}  // namespace octavo::cache_model
