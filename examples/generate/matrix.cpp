// SPDX-License-Identifier: Apache-2.0
// Products by the few-rows kernel, which reads the weights once, or by BLAS, which computes faster.
#include "examples/generate/matrix.h"

#include <cblas.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "examples/generate/error.h"
#include "examples/generate/kernels.h"
#include "examples/generate/quant.h"

namespace generate {
namespace {

using kernels::kMaxFewRows;

// Rows that a thread takes at a time: long enough to stream, short enough to balance.
constexpr std::size_t kRowChunk = 32;
// Rows of BF16 weights that are widened for one call of BLAS: they stay in the second-level cache.
constexpr std::size_t kWidenRows = 256;

blasint to_blas(std::size_t value) { return static_cast<blasint>(value); }

// y [m, n] (rows y_stride apart) = x [m, k] * w [n, k] transposed.
void gemm(const float* x, const float* w, float* y, std::size_t m, std::size_t n, std::size_t k,
          std::size_t y_stride) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, to_blas(m), to_blas(n), to_blas(k), 1.0F, x,
              to_blas(k), w, to_blas(k), 0.0F, y, to_blas(y_stride));
}

}  // namespace

void* allocate(std::size_t bytes) {
  constexpr std::size_t kHugePage = std::size_t{1} << 21U;
  const std::size_t alignment = bytes >= 2 * kHugePage ? kHugePage : 64;
  if (bytes > SIZE_MAX - alignment) throw std::bad_alloc();
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* const at = std::aligned_alloc(alignment, rounded);
  if (at == nullptr && bytes > 0) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  // Only a wish; without it the same memory comes in small pages.
  if (alignment == kHugePage) madvise(at, rounded, MADV_HUGEPAGE);
#endif
  return at;
}

Matrix::Matrix(std::size_t rows, std::size_t columns, WeightType type)
    : rows_(rows), columns_(columns) {
  if (columns > 0 && rows > SIZE_MAX / columns) throw std::bad_alloc();
  if (type == WeightType::F32) {
    f32_ = Buffer<float>(rows * columns);
  } else {
    bf16_ = Buffer<std::uint16_t>(rows * columns);
  }
}

std::size_t Matrix::bytes() const noexcept {
  return f32_.size() * sizeof(float) + bf16_.size() * sizeof(std::uint16_t);
}

void Matrix::set_row(std::size_t row, std::span<const float> values) noexcept {
  if (f32_.data() != nullptr) {
    std::copy(values.begin(), values.end(), f32_.data() + row * columns_);
  } else {
    std::transform(values.begin(), values.end(), bf16_.data() + row * columns_, to_bf16);
  }
}

void Matrix::get_row(std::size_t row, std::span<float> values) const noexcept {
  if (f32_.data() != nullptr) {
    std::copy_n(f32_.data() + row * columns_, values.size(), values.data());
  } else {
    kernels::widen(bf16_.data() + row * columns_, values.size(), values.data());
  }
}

void Matrix::multiply(const float* x, std::size_t num_x, float* y, int num_threads) const {
  if (num_x <= kMaxFewRows) {
    multiply_few(x, num_x, y, num_threads);
  } else {
    multiply_many(x, num_x, y, num_threads);
  }
}

void Matrix::multiply_few(const float* x, std::size_t num_x, float* y, int num_threads) const {
  if (num_x == 0) return;
  const kernels::Weights weights = {f32_.data(), bf16_.data(), columns_};
  const auto num_chunks = static_cast<std::int64_t>((rows_ + kRowChunk - 1) / kRowChunk);
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const std::size_t begin = static_cast<std::size_t>(chunk) * kRowChunk;
    kernels::few_rows(weights, begin, std::min(begin + kRowChunk, rows_), x, columns_, num_x, y,
                      rows_);
  }
}

void Matrix::multiply_many(const float* x, std::size_t num_x, float* y, int num_threads) const {
  if (f32_.data() != nullptr) {
    gemm(x, f32_.data(), y, num_x, rows_, columns_, rows_);
    return;
  }
  Buffer<float> wide(kWidenRows * columns_);
  for (std::size_t begin = 0; begin < rows_; begin += kWidenRows) {
    const std::size_t count = std::min(kWidenRows, rows_ - begin);
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (std::int64_t r = 0; r < static_cast<std::int64_t>(count); ++r) {
      const auto row = static_cast<std::size_t>(r);
      kernels::widen(bf16_.data() + (begin + row) * columns_, columns_,
                     wide.data() + row * columns_);
    }
    gemm(x, wide.data(), y + begin, num_x, count, columns_, rows_);
  }
}

std::uint64_t Matrix::read_all(int num_threads) const {
  const void* const data = f32_.data() != nullptr ? static_cast<const void*>(f32_.data())
                                                  : static_cast<const void*>(bf16_.data());
  const auto* const first = static_cast<const unsigned char*>(data);
  constexpr std::size_t kChunk = 1U << 18U;
  const std::size_t count = bytes();
  const auto num_chunks = static_cast<std::int64_t>((count + kChunk - 1) / kChunk);
  std::uint64_t all = 0;
#pragma omp parallel for num_threads(num_threads) schedule(static) reduction(^ : all)
  for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const std::size_t begin = static_cast<std::size_t>(chunk) * kChunk;
    all ^= kernels::read(first + begin, std::min(kChunk, count - begin));
  }
  return all;
}

void prepare_blas(int num_threads) {
  openblas_set_num_threads(num_threads);
  // Sizes on both sides of the kernels' tiles, the last one large enough for threads and packing.
  struct Size {
    std::size_t m, n, k;
  };
  for (const Size size : {Size{9, 5, 7}, Size{17, 33, 65}, Size{40, 130, 300}}) {
    std::vector<float> x(size.m * size.k);
    std::vector<float> w(size.n * size.k);
    std::vector<float> y(size.m * size.n, NAN);
    // Small whole numbers: their sums are exact in any order.
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7 % 13) - 6.0F;
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(i * 5 % 11) - 5.0F;
    gemm(x.data(), w.data(), y.data(), size.m, size.n, size.k, size.n);
    for (std::size_t i = 0; i < size.m; ++i) {
      for (std::size_t j = 0; j < size.n; ++j) {
        float wanted = 0.0F;
        for (std::size_t c = 0; c < size.k; ++c) wanted += x[i * size.k + c] * w[j * size.k + c];
        if (y[i * size.n + j] == wanted) continue;
        throw octavo::Error(
            octavo::ErrorCode::DeviceFailure,
            fmt::format("BLAS: wanted a right product of [{}, {}] and [{}, {}], got {} instead of "
                        "{} at [{}, {}] ({}, kernels {}; OPENBLAS_CORETYPE=Haswell may help)",
                        size.m, size.k, size.k, size.n, y[i * size.n + j], wanted, i, j,
                        openblas_get_config(), openblas_get_corename()));
      }
    }
  }
}

}  // namespace generate
