// SPDX-License-Identifier: Apache-2.0
// The two products of attention by its definition, as cuBLASLt does them for a whole prompt at once
// where memory is no matter: what unfused is measured by.
#include "bench/gpu/harness.h"

#include <cublasLt.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace octavo::bench {
namespace {

constexpr std::size_t kScratchBytes = std::size_t{32} << 20U;

void check_blas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ErrorCode::DeviceFailure,
                fmt::format("{}: {}", what, cublasLtGetStatusString(status)));
}

/// Row-major F32 c [batch, m, n] = a [batch, m, k] b; b is [batch, n, k] (transposed) or
/// [batch, k, n]. All dense and BF16 but c.
class Product {
 public:
  Product(cublasLtHandle_t handle, bool transposed, std::int64_t m, std::int64_t n, std::int64_t k,
          std::int32_t batch)
      : handle_(handle) {
    check_blas(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "operation");
    const cublasOperation_t turn = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    check_blas(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &turn,
                                              sizeof(turn)),
               "transposition");
    b_ = layout(CUDA_R_16BF, transposed ? k : n, transposed ? n : k, batch);
    a_ = layout(CUDA_R_16BF, k, m, batch);
    c_ = layout(CUDA_R_32F, n, m, batch);
    cublasLtMatmulPreference_t preference = nullptr;
    check_blas(cublasLtMatmulPreferenceCreate(&preference), "preference");
    check_blas(
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &kScratchBytes, sizeof(kScratchBytes)),
        "preference");
    int found = 0;
    check_blas(cublasLtMatmulAlgoGetHeuristic(handle, operation_, b_, a_, c_, c_, preference, 1,
                                              &chosen_, &found),
               "heuristic");
    static_cast<void>(cublasLtMatmulPreferenceDestroy(preference));
  }
  ~Product() {
    for (cublasLtMatrixLayout_t layout : {a_, b_, c_})
      static_cast<void>(cublasLtMatrixLayoutDestroy(layout));
    static_cast<void>(cublasLtMatmulDescDestroy(operation_));
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  void run(const DeviceMemory& a, const DeviceMemory& b, const DeviceMemory& c,
           const DeviceMemory& scratch, Stream stream) const {
    const float one = 1.0F;
    const float zero = 0.0F;
    check_blas(
        cublasLtMatmul(handle_, operation_, &one, b.data(), b_, a.data(), a_, &zero, c.data(), c_,
                       c.data(), c_, &chosen_.algo, scratch.data(), kScratchBytes, stream.handle),
        "cublasLtMatmul");
  }

 private:
  static cublasLtMatrixLayout_t layout(cudaDataType_t type, std::int64_t rows, std::int64_t cols,
                                       std::int32_t batch) {
    cublasLtMatrixLayout_t made = nullptr;
    check_blas(cublasLtMatrixLayoutCreate(&made, type, static_cast<std::uint64_t>(rows),
                                          static_cast<std::uint64_t>(cols), rows),
               "layout");
    const std::int64_t stride = rows * cols;
    check_blas(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch,
                                                sizeof(batch)),
               "layout");
    check_blas(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                &stride, sizeof(stride)),
               "layout");
    return made;
  }

  cublasLtHandle_t handle_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
  cublasLtMatmulHeuristicResult_t chosen_ = {};
};

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
  const DeviceMemory p = weights(num_kv_heads * rows * tokens);
  const DeviceMemory scores(kGpu, static_cast<std::size_t>(num_kv_heads * rows * tokens) * 4);
  const DeviceMemory out(kGpu, static_cast<std::size_t>(num_kv_heads * rows * dim) * 4);
  const DeviceMemory scratch(kGpu, kScratchBytes);
  cublasLtHandle_t handle = nullptr;
  check_blas(cublasLtCreate(&handle), "cublasLtCreate");
  double us = 0.0;
  {
    const Product scores_of(handle, true, rows, tokens, dim, num_kv_heads);
    const Product out_of(handle, false, rows, dim, tokens, num_kv_heads);
    us = clock.in_stream(2, [&](int) {
      scores_of.run(q, k, scores, scratch, clock.stream());
      out_of.run(p, k, out, scratch, clock.stream());
    });
  }
  static_cast<void>(cublasLtDestroy(handle));
  return us;
}

}  // namespace octavo::bench
