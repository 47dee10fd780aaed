// SPDX-License-Identifier: Apache-2.0
// Batched products by cuBLASLt, with what was prepared for a shape kept for the next time.
#pragma once

#include <octavo/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

struct CUstream_st;

namespace octavo::kernels::cuda {

/// Row-major c [batch, m, n] = alpha * a [batch, m, k] * b, where b is [batch, n, k] (transposed)
/// or [batch, k, n]. Rows of a are `a_row` apart, the others dense; matrices of a batch are strides
/// apart (elements). a and b have one dtype, c is F32; sums are float32, and F32 products are true
/// F32.
struct Product {
  DType dtype = DType::F32;
  bool b_transposed = false;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t a_row = 0;
  std::int64_t a_stride = 0;
  std::int64_t b_stride = 0;
  std::int64_t c_stride = 0;
  std::int32_t batch = 0;

  friend bool operator==(const Product&, const Product&) = default;
};

class Matmul {
 public:
  /// Scratch that `run` wants: enough to cut the sums of few rows, while with more of it cuBLASLt
  /// cuts those of 4096 rows as well, which is slower (H200, 25.4 µs for 21.9).
  static constexpr std::size_t kScratchBytes = std::size_t{4} << 20U;

  Matmul();
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  /// Throws DeviceFailure, naming the call.
  void run(const Product& product, float alpha, const void* a, const void* b, float* c,
           void* scratch, CUstream_st* stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace octavo::kernels::cuda
