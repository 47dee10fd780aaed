// SPDX-License-Identifier: Apache-2.0
#include "examples/generate/cuda/product.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <octavo/error.h>

#include <map>
#include <tuple>
#include <utility>

namespace generate::gpu {
namespace {

constexpr std::size_t kScratchBytes = std::size_t{32} << 20U;

void check_blas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw octavo::Error(octavo::ErrorCode::DeviceFailure,
                      fmt::format("{}: {}", call, cublasLtGetStatusString(status)));
}

/// One shape of product. cuBLAS is column-major: y^T = matrix x^T, and a row-major matrix is its
/// transpose already.
class Shape {
 public:
  Shape(cublasLtHandle_t handle, std::int64_t rows, std::int64_t columns, std::int64_t count,
        WeightType type) {
    const cudaDataType_t data = type == WeightType::F32 ? CUDA_R_32F : CUDA_R_16BF;
    check_blas(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
               "cublasLtMatmulDescCreate");
    const cublasOperation_t turned = CUBLAS_OP_T;
    check_blas(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &turned,
                                              sizeof(turned)),
               "cublasLtMatmulDescSetAttribute");
    make(matrix_, data, columns, rows);
    make(x_, data, columns, count);
    make(y_, CUDA_R_32F, rows, count);
    choose(handle);
  }
  ~Shape() {
    for (cublasLtMatrixLayout_t layout : {matrix_, x_, y_}) {
      if (layout != nullptr) static_cast<void>(cublasLtMatrixLayoutDestroy(layout));
    }
    if (operation_ != nullptr) static_cast<void>(cublasLtMatmulDescDestroy(operation_));
  }
  Shape(const Shape&) = delete;
  Shape& operator=(const Shape&) = delete;

  void run(cublasLtHandle_t handle, const void* matrix, const void* x, float* y, bool adds,
           void* scratch) const {
    const float alpha = 1.0F;
    const float beta = adds ? 1.0F : 0.0F;
    check_blas(cublasLtMatmul(handle, operation_, &alpha, matrix, matrix_, x, x_, &beta, y, y_, y,
                              y_, &algorithm_, scratch, kScratchBytes, nullptr),
               "cublasLtMatmul");
  }

 private:
  static void make(cublasLtMatrixLayout_t& layout, cudaDataType_t type, std::int64_t rows,
                   std::int64_t columns) {
    check_blas(cublasLtMatrixLayoutCreate(&layout, type, static_cast<std::uint64_t>(rows),
                                          static_cast<std::uint64_t>(columns), rows),
               "cublasLtMatrixLayoutCreate");
  }

  void choose(cublasLtHandle_t handle) {
    cublasLtMatmulPreference_t preference = nullptr;
    check_blas(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const std::size_t scratch = kScratchBytes;
    cublasLtMatmulHeuristicResult_t result = {};
    int found = 0;
    cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &scratch, sizeof(scratch));
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatmulAlgoGetHeuristic(handle, operation_, matrix_, x_, y_, y_, preference,
                                              1, &result, &found);
    }
    static_cast<void>(cublasLtMatmulPreferenceDestroy(preference));
    check_blas(status, "cublasLtMatmulAlgoGetHeuristic");
    check_blas(found > 0 ? result.state : CUBLAS_STATUS_NOT_SUPPORTED,
               "cublasLtMatmulAlgoGetHeuristic");
    algorithm_ = result.algo;
  }

  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t matrix_ = nullptr, x_ = nullptr, y_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_ = {};
};

}  // namespace

void check(int code, const char* call) {
  if (code == 0) return;
  const auto error = static_cast<cudaError_t>(code);
  static_cast<void>(cudaGetLastError());
  throw octavo::Error(error == cudaErrorMemoryAllocation ? octavo::ErrorCode::OutOfMemory
                                                         : octavo::ErrorCode::DeviceFailure,
                      fmt::format("{}: {}", call, cudaGetErrorString(error)));
}

Memory::~Memory() {
  if (data_ != nullptr) static_cast<void>(cudaFree(data_));
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

void Memory::fit(std::size_t num_bytes) {
  if (num_bytes <= num_bytes_) return;
  if (data_ != nullptr) static_cast<void>(cudaFree(std::exchange(data_, nullptr)));
  num_bytes_ = 0;
  check(cudaMalloc(&data_, num_bytes), "cudaMalloc");
  num_bytes_ = num_bytes;
}

void Memory::upload(const void* from, std::size_t num_bytes) {
  fit(num_bytes);
  if (num_bytes == 0) return;
  check(cudaMemcpy(data_, from, num_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

struct Products::State {
  cublasLtHandle_t handle = nullptr;
  Memory scratch{kScratchBytes};
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, Shape> shapes;

  State() { check_blas(cublasLtCreate(&handle), "cublasLtCreate"); }
  ~State() { static_cast<void>(cublasLtDestroy(handle)); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
};

Products::Products() : state_(std::make_unique<State>()) {}
Products::~Products() = default;

void Products::multiply(const GpuMatrix& matrix, WeightType type, const void* x, std::int64_t count,
                        float* y, bool adds) {
  if (count == 0) return;
  const auto key = std::make_tuple(matrix.rows, matrix.columns, count);
  const auto [shape, is_new] =
      state_->shapes.try_emplace(key, state_->handle, matrix.rows, matrix.columns, count, type);
  static_cast<void>(is_new);
  shape->second.run(state_->handle, matrix.memory.get(), x, y, adds, state_->scratch.get());
}

}  // namespace generate::gpu
