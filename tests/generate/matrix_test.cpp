// SPDX-License-Identifier: Apache-2.0
// Matrix products and the other loops of the model, against plain ones in float64.
#include "examples/generate/matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "examples/generate/kernels.h"
#include "examples/generate/quant.h"

namespace generate {
namespace {

std::vector<float> numbers(std::size_t count, std::uint32_t seed) {
  std::vector<float> values(count);
  for (float& value : values) {
    seed = seed * 1664525U + 1013904223U;
    value = static_cast<float>(seed >> 8U) * 0x1p-23F - 1.0F;
  }
  return values;
}

Matrix make_matrix(std::size_t rows, std::size_t columns, WeightType type) {
  Matrix matrix(rows, columns, type);
  const std::vector<float> values = numbers(rows * columns, 1);
  for (std::size_t r = 0; r < rows; ++r) {
    matrix.set_row(r, std::span(values).subspan(r * columns, columns));
  }
  return matrix;
}

// rows, columns, inputs, type
using Case = std::tuple<std::size_t, std::size_t, std::size_t, WeightType>;
class Product : public ::testing::TestWithParam<Case> {};

TEST_P(Product, EqualsThePlainOne) {
  const auto [rows, columns, num_x, type] = GetParam();
  const Matrix matrix = make_matrix(rows, columns, type);
  const std::vector<float> x = numbers(num_x * columns, 2);
  std::vector<float> y(num_x * rows, NAN);
  matrix.multiply(x.data(), num_x, y.data(), 2);
  std::vector<float> row(columns);
  for (std::size_t r = 0; r < rows; ++r) {
    matrix.get_row(r, row);
    for (std::size_t i = 0; i < num_x; ++i) {
      double wanted = 0.0;
      double size = 0.0;
      for (std::size_t c = 0; c < columns; ++c) {
        const double term = static_cast<double>(row[c]) * static_cast<double>(x[i * columns + c]);
        wanted += term;
        size += std::abs(term);
      }
      // A float32 sum of n terms is off by at most n half units in the last place of their size.
      const double bound = static_cast<double>(columns) * 0x1p-24 * size;
      ASSERT_NEAR(static_cast<double>(y[i * rows + r]), wanted, bound) << r << ", " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Product,
                         ::testing::Combine(::testing::Values(1U, 67U, 300U),
                                            ::testing::Values(1U, 15U, 129U),
                                            ::testing::Values(1U, 2U, 3U, 5U, 8U, 9U, 33U),
                                            ::testing::Values(WeightType::F32, WeightType::Bf16)));

// What a sequence computes must not depend on how many others there are.
TEST(Matrix, FewInputsGiveTheSameBitsAsOne) {
  const Matrix matrix = make_matrix(67, 129, WeightType::F32);
  const std::vector<float> x = numbers(8 * 129, 2);
  std::vector<float> together(8 * 67);
  std::vector<float> alone(67);
  matrix.multiply(x.data(), 8, together.data(), 2);
  for (std::size_t i = 0; i < 8; ++i) {
    matrix.multiply(x.data() + i * 129, 1, alone.data(), 1);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(),
                           together.begin() + static_cast<std::ptrdiff_t>(i * 67)));
  }
}

TEST(Matrix, RoundsToBfloat) {
  Matrix matrix(1, 2, WeightType::Bf16);
  const std::vector<float> values = {0x1.0102p0F, -3.0F};
  matrix.set_row(0, values);
  std::vector<float> back(2);
  matrix.get_row(0, back);
  EXPECT_EQ(back, (std::vector<float>{from_bf16(0x3F81), -3.0F}));
}

TEST(Matrix, AnAbsurdSizeIsOutOfMemory) {
  EXPECT_THROW(Matrix(SIZE_MAX / 2, 3, WeightType::F32), std::bad_alloc);
}

TEST(Blas, PassesItsCheckHere) { EXPECT_NO_THROW(prepare_blas(2)); }

TEST(Kernels, NormaliseByTheRootMeanSquare) {
  const std::vector<float> x = numbers(37, 3);
  const std::vector<float> gain = numbers(37, 4);
  std::vector<float> out(37);
  kernels::rms_norm(x.data(), gain.data(), 37, 1e-5F, out.data());
  double squares = 0.0;
  for (const float value : x) squares += static_cast<double>(value) * static_cast<double>(value);
  for (std::size_t i = 0; i < 37; ++i) {
    const double wanted =
        static_cast<double>(x[i]) / std::sqrt(squares / 37.0 + 1e-5) * static_cast<double>(gain[i]);
    EXPECT_NEAR(static_cast<double>(out[i]), wanted, 4e-7);
  }
}

TEST(Kernels, GateFarOutWithoutOverflow) {
  std::vector<float> gate = {-1e30F, -200.0F, -90.0F, -1.0F, 0.0F, 1.0F, 90.0F, 1e30F};
  gate.resize(35, 2.0F);
  const std::vector<float> before = gate;
  const std::vector<float> up(35, 0.5F);
  kernels::swiglu(gate.data(), up.data(), gate.size());
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const double x = static_cast<double>(before[i]);
    const double wanted = x / (1.0 + std::exp(-x)) * 0.5;
    EXPECT_NEAR(static_cast<double>(gate[i]), wanted, 1e-12 + 1e-6 * std::abs(wanted)) << x;
  }
}

TEST(Kernels, WidenEveryPattern) {
  std::vector<std::uint16_t> bits(1001);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i * 13);
  std::vector<float> out(bits.size());
  kernels::widen(bits.data(), bits.size(), out.data());
  for (std::size_t i = 0; i < bits.size(); ++i) EXPECT_EQ(out[i], from_bf16(bits[i]));
}

}  // namespace
}  // namespace generate
