// SPDX-License-Identifier: Apache-2.0
// The append: slots, dtypes, rotation, clearing, and that nothing else is touched.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/convert.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/kernels.h"
#include "testing/oracle.h"

namespace octavo::test {
namespace {

using kernels::AppendParams;
using kernels::cpu::load_element;
using kernels::cpu::store_element;

constexpr float kUntouched = 77.0F;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Two sequences over pages of 4 slots: one enters at position 3 with 6 tokens, one at 0 with 2.
class AppendTest : public testing::Test {
 protected:
  static constexpr std::int32_t kHeads = 2;
  static constexpr std::int32_t kPage = 4;
  static constexpr std::int32_t kPages = 6;
  static constexpr std::int32_t kTokens = 8;
  static constexpr std::int32_t kRows = 11;  // the last 3 are padding

  AppendTest() {
    params_.batch = {2, kTokens, offsets_.data(), lens_.data(), nullptr, table_.data(), 3, nullptr};
    params_.num_kv_heads = kHeads;
    params_.num_threads = 2;
  }

  // Makes tensors; token t, head h, element d of K is value(t, h, d), of V its negative.
  template <typename Value>
  void prepare(DType from, DType to, std::int32_t dim, std::int32_t dim_v, Value value) {
    from_ = from;
    params_.head_dim = dim;
    params_.head_dim_v = dim_v;
    params_.k_dtype = params_.v_dtype = from;
    params_.kv.dtype = to;
    params_.kv.page_size = kPage;
    params_.kv.num_pages = kPages;
    const auto make = [&](std::vector<char>& memory, DType dtype, std::int64_t count, float fill) {
      memory.resize(static_cast<std::size_t>(count * dtype_bytes(dtype)));
      for (std::int64_t i = 0; i < count; ++i) store_element(memory.data(), dtype, i, fill);
      return memory.data();
    };
    const std::int64_t slots = std::int64_t{kPages} * kPage * kHeads;
    params_.kv.k = {make(k_pages_, to, slots * dim, kUntouched), kPage * kHeads * dim, kHeads * dim,
                    dim, 1};
    params_.kv.v = {make(v_pages_, to, slots * dim_v, kUntouched), kPage * kHeads * dim_v,
                    kHeads * dim_v, dim_v, 1};
    params_.k = make(k_, from, std::int64_t{kRows} * kHeads * dim, kNan);
    params_.v = make(v_, from, std::int64_t{kRows} * kHeads * dim_v, kNan);
    params_.k_layout = {true, 0, kHeads * dim, dim, 1, 0, kRows};
    params_.v_layout = {true, 0, kHeads * dim_v, dim_v, 1, 0, kRows};
    for (std::int32_t t = 0; t < kTokens; ++t) {
      for (std::int32_t h = 0; h < kHeads; ++h) {
        for (std::int32_t d = 0; d < dim; ++d) {
          store_element(k_.data(), from, (t * kHeads + h) * dim + d, value(t, h, d));
        }
        for (std::int32_t d = 0; d < dim_v; ++d) {
          store_element(v_.data(), from, (t * kHeads + h) * dim_v + d, -value(t, h, d));
        }
      }
    }
  }

  float cached(const kernels::PagedTensor& tensor, std::int32_t page, std::int32_t slot,
               std::int32_t h, std::int32_t d) const {
    return load_element(tensor.data, params_.kv.dtype,
                        page * tensor.page_stride + slot * tensor.slot_stride +
                            h * tensor.head_stride + d * tensor.dim_stride);
  }

  // Page and slot of packed token t.
  static std::pair<std::int32_t, std::int32_t> place_of(std::int32_t t) {
    if (t < 6) return {t < 1 ? 5 : (t < 5 ? 0 : 3), (3 + t) % kPage};
    return {2, t - 6};
  }

  std::vector<std::int32_t> offsets_ = {0, 6, 8};
  std::vector<std::int32_t> lens_ = {9, 2};
  std::vector<std::int32_t> table_ = {5, 0, 3, 2, 1 << 30, 1 << 30};
  AppendParams params_;
  DType from_ = DType::F32;
  std::vector<char> k_pages_, v_pages_, k_, v_;
};

float plain(std::int32_t t, std::int32_t h, std::int32_t d) {
  return static_cast<float>(100 * t + 10 * h + d) * 0.0037F;
}

TEST_F(AppendTest, WritesEachTokenToItsSlotInTheCachesDtype) {
  for (const DType from : {DType::F32, DType::F16, DType::BF16}) {
    for (const DType to : {DType::F32, DType::F16, DType::BF16}) {
      prepare(from, to, 3, 5, plain);
      kernels::cpu::append(params_);
      for (std::int32_t t = 0; t < kTokens; ++t) {
        const auto [page, slot] = place_of(t);
        float cell = 0.0F;
        store_element(&cell, from, 0, plain(t, 1, 2));
        const float given = load_element(&cell, from, 0);
        store_element(&cell, to, 0, given);
        const float wanted = load_element(&cell, to, 0);
        ASSERT_EQ(cached(params_.kv.k, page, slot, 1, 2), wanted) << "token " << t;
        ASSERT_EQ(cached(params_.kv.v, page, slot, 1, 2), -wanted) << "token " << t;
      }
    }
  }
}

TEST_F(AppendTest, TouchesNoOtherSlot) {
  prepare(DType::F32, DType::F32, 3, 5, plain);
  kernels::cpu::append(params_);
  int untouched = 0;
  for (std::int32_t page = 0; page < kPages; ++page) {
    for (std::int32_t slot = 0; slot < kPage; ++slot) {
      untouched += cached(params_.kv.k, page, slot, 0, 0) == kUntouched ? 1 : 0;
    }
  }
  EXPECT_EQ(untouched, kPages * kPage - kTokens);
}

TEST_F(AppendTest, ClearsOnlyTheSlotsBehindTheNewEnd) {
  prepare(DType::BF16, DType::F16, 3, 5, plain);
  const std::vector<std::int32_t> clear = {2, 0};
  params_.batch.clear_lens = clear.data();
  kernels::cpu::append(params_);
  EXPECT_NE(cached(params_.kv.k, 3, 0, 1, 2), 0.0F);
  EXPECT_EQ(cached(params_.kv.k, 3, 1, 1, 2), 0.0F);
  EXPECT_EQ(cached(params_.kv.v, 3, 2, 0, 4), 0.0F);
  EXPECT_EQ(cached(params_.kv.k, 3, 3, 0, 0), kUntouched);
  EXPECT_EQ(cached(params_.kv.v, 2, 2, 0, 0), kUntouched);
}

TEST_F(AppendTest, ReadsAnyStrides) {
  prepare(DType::F32, DType::F32, 3, 3, plain);
  // Elements of a head lie a whole row apart.
  std::vector<float> strided(std::size_t{kTokens} * kHeads * 3);
  for (std::int32_t t = 0; t < kTokens; ++t) {
    for (std::int32_t h = 0; h < kHeads; ++h) {
      for (std::int32_t d = 0; d < 3; ++d) {
        strided[static_cast<std::size_t>((d * kHeads + h) * kTokens + t)] = plain(t, h, d);
      }
    }
  }
  params_.k = strided.data();
  params_.k_layout = {true, 0, 1, kTokens, kTokens * kHeads, 0, kTokens};
  kernels::cpu::append(params_);
  EXPECT_EQ(cached(params_.kv.k, 3, 0, 1, 2), plain(5, 1, 2));
}

class RotatingAppend : public AppendTest {
 protected:
  static constexpr std::int32_t kDim = 12;

  // The largest distance of stored K to the float64 definition.
  double worst(const Rope& rope, const std::int32_t* positions) {
    prepare(DType::F32, DType::F32, kDim, kDim, plain);
    params_.rope = {rope.style, rope.rotary_dim,          rope.base, rope.cos,
                    rope.sin,   rope.num_table_positions, positions};
    kernels::cpu::append(params_);
    double result = 0.0;
    for (std::int32_t t = 0; t < kTokens; ++t) {
      const auto [page, slot] = place_of(t);
      std::vector<double> head;
      for (std::int32_t d = 0; d < kDim; ++d) head.push_back(static_cast<double>(plain(t, 1, d)));
      const std::int64_t planned = t < 6 ? 3 + t : t - 6;
      testkit::rotate_by_definition(rope, positions != nullptr ? positions[t] : planned, head);
      for (std::int32_t d = 0; d < kDim; ++d) {
        const double got = static_cast<double>(cached(params_.kv.k, page, slot, 1, d));
        result = std::max(result, std::abs(got - head[static_cast<std::size_t>(d)]) /
                                      (1.0 + std::abs(head[static_cast<std::size_t>(d)])));
        EXPECT_EQ(cached(params_.kv.v, page, slot, 1, d), -plain(t, 1, d));
      }
    }
    return result;
  }
};

TEST_F(RotatingAppend, TurnsHalves) {
  EXPECT_LT(worst({.style = RopeStyle::Half, .rotary_dim = kDim}, nullptr), 1e-6);
}

TEST_F(RotatingAppend, TurnsInterleavedPairs) {
  EXPECT_LT(worst({.style = RopeStyle::Interleaved, .rotary_dim = kDim, .base = 500.0}, nullptr),
            1e-6);
}

TEST_F(RotatingAppend, TurnsTheFirstDimsOnly) {
  EXPECT_LT(worst({.style = RopeStyle::Half, .rotary_dim = 4}, nullptr), 1e-6);
}

TEST_F(RotatingAppend, TakesExplicitPositions) {
  const std::vector<std::int32_t> positions = {100, 7, 7, 0, 65000, 1, 2, 3};
  EXPECT_LT(worst({.style = RopeStyle::Half, .rotary_dim = kDim}, positions.data()), 1e-6);
}

TEST_F(RotatingAppend, TakesTheCallersTables) {
  std::vector<float> cos, sin;
  for (int i = 0; i < 9 * 3; ++i) {
    cos.push_back(static_cast<float>(std::cos(0.3 * i)));
    sin.push_back(static_cast<float>(std::sin(0.3 * i)));
  }
  const Rope rope{.style = RopeStyle::Interleaved,
                  .rotary_dim = 6,
                  .cos = cos.data(),
                  .sin = sin.data(),
                  .num_table_positions = 9};
  EXPECT_LT(worst(rope, nullptr), 1e-6);
}

}  // namespace
}  // namespace octavo::test
