// SPDX-License-Identifier: Apache-2.0
// SIMD loops, compiled once for each instruction set and chosen at run time.
#include "examples/generate/kernels.h"

#include <algorithm>
#include <array>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "examples/generate/kernels.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway wants it.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace generate::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using FloatTag = hn::ScalableTag<float>;
using Floats = hn::Vec<FloatTag>;

HWY_INLINE Floats load(const float* from) { return hn::LoadU(FloatTag(), from); }

HWY_INLINE Floats load(const std::uint16_t* bf16) {
  const hn::Rebind<std::uint16_t, FloatTag> narrow;
  const hn::Rebind<std::uint32_t, FloatTag> wide;
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::PromoteTo(wide, hn::LoadU(narrow, bf16))));
}

HWY_INLINE float load_one(const float* from) { return *from; }

HWY_INLINE float load_one(const std::uint16_t* bf16) {
  const std::uint32_t bits = static_cast<std::uint32_t>(*bf16) << 16U;
  float value;
  hwy::CopyBytes<4>(&bits, &value);
  return value;
}

// A tile of kRows weight rows times kInputs inputs, so that each load serves several products. One
// accumulator for each product: the order of its sum is the same in every tile.
template <std::size_t kRows, std::size_t kInputs, typename WeightT>
HWY_NOINLINE void few_rows_tile(const WeightT* weights, std::size_t columns, const float* x,
                                std::size_t x_stride, std::size_t num_x, float* y,
                                std::size_t y_stride) {
  const FloatTag tag;
  const std::size_t lanes = hn::Lanes(tag);
  std::array<const float*, kInputs> inputs;
  // Inputs that are not there repeat the last one; nobody stores their results.
  for (std::size_t i = 0; i < kInputs; ++i) inputs[i] = x + std::min(i, num_x - 1) * x_stride;

  Floats sums[kRows][kInputs];
  for (auto& row : sums) {
    for (Floats& value : row) value = hn::Zero(tag);
  }
  std::size_t c = 0;
  for (; c + lanes <= columns; c += lanes) {
    Floats row_values[kRows];
    for (std::size_t r = 0; r < kRows; ++r) row_values[r] = load(weights + r * columns + c);
    for (std::size_t i = 0; i < kInputs; ++i) {
      const Floats input = hn::LoadU(tag, inputs[i] + c);
      for (std::size_t r = 0; r < kRows; ++r) {
        sums[r][i] = hn::MulAdd(row_values[r], input, sums[r][i]);
      }
    }
  }
  for (std::size_t i = 0; i < std::min(num_x, kInputs); ++i) {
    for (std::size_t r = 0; r < kRows; ++r) {
      float total = hn::GetLane(hn::SumOfLanes(tag, sums[r][i]));
      for (std::size_t rest = c; rest < columns; ++rest) {
        total += load_one(weights + r * columns + rest) * inputs[i][rest];
      }
      y[i * y_stride + r] = total;
    }
  }
}

template <std::size_t kRows, std::size_t kInputs, typename WeightT>
void few_rows_range(const WeightT* weights, std::size_t columns, std::size_t begin, std::size_t end,
                    const float* x, std::size_t x_stride, std::size_t num_x, float* y,
                    std::size_t y_stride) {
  std::size_t r = begin;
  for (; r + kRows <= end; r += kRows) {
    few_rows_tile<kRows, kInputs>(weights + r * columns, columns, x, x_stride, num_x, y + r,
                                  y_stride);
  }
  for (; r < end; ++r) {
    few_rows_tile<1, kInputs>(weights + r * columns, columns, x, x_stride, num_x, y + r, y_stride);
  }
}

template <typename WeightT>
void few_rows_typed(const WeightT* weights, std::size_t columns, std::size_t begin, std::size_t end,
                    const float* x, std::size_t x_stride, std::size_t num_x, float* y,
                    std::size_t y_stride) {
  if (num_x <= 1) {
    few_rows_range<4, 1>(weights, columns, begin, end, x, x_stride, num_x, y, y_stride);
  } else if (num_x <= 2) {
    few_rows_range<4, 2>(weights, columns, begin, end, x, x_stride, num_x, y, y_stride);
  } else if (num_x <= 4) {
    few_rows_range<2, 4>(weights, columns, begin, end, x, x_stride, num_x, y, y_stride);
  } else {
    few_rows_range<2, 8>(weights, columns, begin, end, x, x_stride, num_x, y, y_stride);
  }
}

void few_rows_simd(const Weights& weights, std::size_t begin, std::size_t end, const float* x,
                   std::size_t x_stride, std::size_t num_x, float* y, std::size_t y_stride) {
  if (weights.f32 != nullptr) {
    few_rows_typed(weights.f32, weights.columns, begin, end, x, x_stride, num_x, y, y_stride);
  } else {
    few_rows_typed(weights.bf16, weights.columns, begin, end, x, x_stride, num_x, y, y_stride);
  }
}

void widen_simd(const std::uint16_t* bf16, std::size_t count, float* out) {
  const FloatTag tag;
  const std::size_t lanes = hn::Lanes(tag);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(load(bf16 + i), tag, out + i);
  for (; i < count; ++i) out[i] = load_one(bf16 + i);
}

void rms_norm_simd(const float* x, const float* gain, std::size_t count, float epsilon,
                   float* out) {
  const FloatTag tag;
  const std::size_t lanes = hn::Lanes(tag);
  Floats squares = hn::Zero(tag);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Floats value = hn::LoadU(tag, x + i);
    squares = hn::MulAdd(value, value, squares);
  }
  float total = hn::GetLane(hn::SumOfLanes(tag, squares));
  for (; i < count; ++i) total += x[i] * x[i];
  const float scale = 1.0F / std::sqrt(total / static_cast<float>(count) + epsilon);
  const Floats factor = hn::Set(tag, scale);
  for (i = 0; i + lanes <= count; i += lanes) {
    const Floats value = hn::Mul(hn::LoadU(tag, x + i), factor);
    hn::StoreU(hn::Mul(value, hn::LoadU(tag, gain + i)), tag, out + i);
  }
  for (; i < count; ++i) out[i] = x[i] * scale * gain[i];
}

void swiglu_simd(float* gate, const float* up, std::size_t count) {
  const FloatTag tag;
  const std::size_t lanes = hn::Lanes(tag);
  const Floats one = hn::Set(tag, 1.0F);
  // Highway's Exp is specified up to 104; further out silu is x or 0 to the last bit.
  const Floats bound = hn::Set(tag, 100.0F);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Floats value = hn::LoadU(tag, gate + i);
    const Floats power = hn::Exp(tag, hn::Min(hn::Neg(value), bound));
    const Floats silu = hn::Div(value, hn::Add(one, power));
    hn::StoreU(hn::Mul(silu, hn::LoadU(tag, up + i)), tag, gate + i);
  }
  for (; i < count; ++i) gate[i] = gate[i] / (1.0F + std::exp(-gate[i])) * up[i];
}

std::uint64_t read_simd(const unsigned char* bytes, std::size_t count) {
  const hn::ScalableTag<std::uint8_t> tag;
  const std::size_t lanes = hn::Lanes(tag);
  auto first = hn::Zero(tag);
  auto second = hn::Zero(tag);
  for (std::size_t i = 0; i + 2 * lanes <= count; i += 2 * lanes) {
    first = hn::Xor(first, hn::LoadU(tag, bytes + i));
    second = hn::Xor(second, hn::LoadU(tag, bytes + i + lanes));
  }
  return hn::GetLane(hn::Xor(first, second));
}

}  // namespace generate::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace generate::kernels {

HWY_EXPORT(few_rows_simd);
HWY_EXPORT(widen_simd);
HWY_EXPORT(rms_norm_simd);
HWY_EXPORT(swiglu_simd);
HWY_EXPORT(read_simd);

void few_rows(const Weights& weights, std::size_t begin, std::size_t end, const float* x,
              std::size_t x_stride, std::size_t num_x, float* y, std::size_t y_stride) {
  HWY_DYNAMIC_DISPATCH(few_rows_simd)(weights, begin, end, x, x_stride, num_x, y, y_stride);
}

void widen(const std::uint16_t* bf16, std::size_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(widen_simd)(bf16, count, out);
}

void rms_norm(const float* x, const float* gain, std::size_t count, float epsilon, float* out) {
  HWY_DYNAMIC_DISPATCH(rms_norm_simd)(x, gain, count, epsilon, out);
}

void swiglu(float* gate, const float* up, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(swiglu_simd)(gate, up, count);
}

std::uint64_t read(const unsigned char* bytes, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(read_simd)(bytes, count);
}

}  // namespace generate::kernels
#endif  // HWY_ONCE
