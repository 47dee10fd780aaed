// SPDX-License-Identifier: Apache-2.0
// The two products of attention by its definition, as cuBLASLt does them for a whole prompt at once
// where memory is no matter: what unfused is measured by.
#include "bench/gpu/harness.h"
#include "kernels/cuda/unfused/matmul.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace octavo::bench {
namespace {

using kernels::cuda::Matmul;
using kernels::cuda::Product;

/// Of dense BF16 matrices.
Product dense(bool transposed, std::int64_t m, std::int64_t n, std::int64_t k, std::int32_t batch) {
  return {.dtype = DType::BF16,
          .b_transposed = transposed,
          .m = m,
          .n = n,
          .k = k,
          .a_row = k,
          .a_stride = m * k,
          .b_stride = n * k,
          .c_stride = m * n,
          .batch = batch};
}

/// Random weights: zeros would be multiplied faster.
DeviceMemory weights(std::int64_t count) {
  const DeviceMemory block = numbers(std::int64_t{16} << 20U);
  DeviceMemory all(kGpu, static_cast<std::size_t>(count) * 2);
  for (std::size_t at = 0; at < all.size(); at += block.size()) {
    check(cudaMemcpy(all.data() + at, block.data(), std::min(block.size(), all.size() - at),
                     cudaMemcpyDeviceToDevice),
          "cudaMemcpy");
  }
  return all;
}

}  // namespace

double bare_products(GpuClock& clock, std::int32_t num_q_heads, std::int32_t num_kv_heads,
                     std::int64_t dim, std::int64_t tokens) {
  const std::int64_t rows = tokens * (num_q_heads / num_kv_heads);
  const DeviceMemory q = numbers(num_kv_heads * rows * dim);
  const DeviceMemory k = numbers(num_kv_heads * tokens * dim);
  const DeviceMemory v = numbers(num_kv_heads * tokens * dim);
  const DeviceMemory p = weights(num_kv_heads * rows * tokens);
  const DeviceMemory scores(kGpu, static_cast<std::size_t>(num_kv_heads * rows * tokens) * 4);
  const DeviceMemory out(kGpu, static_cast<std::size_t>(num_kv_heads * rows * dim) * 4);
  const DeviceMemory scratch(kGpu, Matmul::kScratchBytes);
  const Product scores_of = dense(true, rows, tokens, dim, num_kv_heads);
  const Product out_of = dense(false, rows, dim, tokens, num_kv_heads);
  Matmul matmul;
  const auto multiply = [&](const Product& product, const DeviceMemory& a, const DeviceMemory& b,
                            const DeviceMemory& c) {
    matmul.run(product, 1.0F, a.data(), b.data(), reinterpret_cast<float*>(c.data()),
               scratch.data(), clock.stream().handle);
  };
  return clock.in_stream(2, [&](int) {
    multiply(scores_of, q, k, scores);
    multiply(out_of, p, v, out);
  });
}

}  // namespace octavo::bench
