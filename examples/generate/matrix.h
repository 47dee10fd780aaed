// SPDX-License-Identifier: Apache-2.0
// Weight matrices and their product with a few or with many rows of activations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>

namespace generate {

enum class WeightType : std::uint8_t { F32, Bf16 };

/// `bytes` of memory, not cleared, aligned for SIMD; in huge pages where they pay and the system
/// has them: streaming weights through small ones costs a table walk every 4 KiB. Free with
/// std::free. Errors: std::bad_alloc.
void* allocate(std::size_t bytes);

/// Memory that is not cleared. Owned, movable.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  /// Errors: std::bad_alloc.
  explicit Buffer(std::size_t count) : size_(count) {
    if (count > SIZE_MAX / sizeof(T)) throw std::bad_alloc();
    data_.reset(static_cast<T*>(allocate(count * sizeof(T))));
  }

  [[nodiscard]] T* data() noexcept { return data_.get(); }
  [[nodiscard]] const T* data() const noexcept { return data_.get(); }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::span<T> span() noexcept { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(T* at) const noexcept { std::free(at); }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t size_ = 0;
};

/// A dense matrix [rows, columns], row-major, in one of the two weight types.
class Matrix {
 public:
  Matrix() = default;
  Matrix(std::size_t rows, std::size_t columns, WeightType type);

  [[nodiscard]] std::size_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::size_t columns() const noexcept { return columns_; }
  [[nodiscard]] std::size_t bytes() const noexcept;
  [[nodiscard]] WeightType type() const noexcept {
    return bf16_.data() != nullptr ? WeightType::Bf16 : WeightType::F32;
  }
  /// The elements, of type().
  [[nodiscard]] const void* data() const noexcept {
    if (bf16_.data() != nullptr) return bf16_.data();
    return f32_.data();
  }

  /// Floats in, rounded if the type asks for it; floats out.
  void set_row(std::size_t row, std::span<const float> values) noexcept;
  void get_row(std::size_t row, std::span<float> values) const noexcept;

  /// y[i] = matrix * x[i] for `num_x` rows x [num_x, columns] and y [num_x, rows], both dense.
  void multiply(const float* x, std::size_t num_x, float* y, int num_threads) const;

  /// One pass over the weights, for measuring how fast they can be read. The result only keeps the
  /// reads alive.
  [[nodiscard]] std::uint64_t read_all(int num_threads) const;

 private:
  void multiply_few(const float* x, std::size_t num_x, float* y, int num_threads) const;
  void multiply_many(const float* x, std::size_t num_x, float* y, int num_threads) const;

  std::size_t rows_ = 0;
  std::size_t columns_ = 0;
  Buffer<float> f32_;
  Buffer<std::uint16_t> bf16_;
};

/// Tells the BLAS how many threads to use and checks it by small products: older builds compute
/// wrong results on newer processors.
///
/// Errors: octavo::Error DeviceFailure that names the BLAS, its kernels, and what it got wrong.
void prepare_blas(int num_threads);

}  // namespace generate
