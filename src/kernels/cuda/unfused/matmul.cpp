// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/unfused/matmul.h"

#include <cublasLt.h>

#include <vector>

#include "base/error.h"

namespace octavo::kernels::cuda {
namespace {

// Lengths are rounded, so a long generation meets a new shape every kKeyStep steps; old ones are
// not met again.
constexpr std::size_t kMostPrepared = 64;

void check_blas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const ErrorCode code =
      status == CUBLAS_STATUS_ALLOC_FAILED ? ErrorCode::OutOfMemory : ErrorCode::DeviceFailure;
  throw Error(code, fmt::format("{}: {}", call, cublasLtGetStatusString(status)));
}

#define OCTAVO_BLAS(call) check_blas((call), #call)

class Layout {
 public:
  /// Column-major [rows, cols], which is row-major [cols, rows]; columns are `leading` apart.
  Layout(cudaDataType_t type, std::int64_t rows, std::int64_t cols, std::int64_t leading,
         std::int64_t stride, std::int32_t batch) {
    OCTAVO_BLAS(cublasLtMatrixLayoutCreate(&handle_, type, static_cast<std::uint64_t>(rows),
                                           static_cast<std::uint64_t>(cols), leading));
    OCTAVO_BLAS(cublasLtMatrixLayoutSetAttribute(handle_, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                 &batch, sizeof(batch)));
    OCTAVO_BLAS(cublasLtMatrixLayoutSetAttribute(
        handle_, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride)));
  }
  ~Layout() {
    if (handle_ != nullptr) static_cast<void>(cublasLtMatrixLayoutDestroy(handle_));
  }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  [[nodiscard]] cublasLtMatrixLayout_t get() const { return handle_; }

 private:
  cublasLtMatrixLayout_t handle_ = nullptr;
};

cudaDataType_t type_of(DType dtype) {
  if (dtype == DType::F32) return CUDA_R_32F;
  return dtype == DType::F16 ? CUDA_R_16F : CUDA_R_16BF;
}

// cuBLAS is column-major: c^T = b^T a^T, and a row-major matrix is its transpose already.
struct Prepared {
  explicit Prepared(const Product& p)
      : product(p),
        b(type_of(p.dtype), p.b_transposed ? p.k : p.n, p.b_transposed ? p.n : p.k,
          p.b_transposed ? p.k : p.n, p.b_stride, p.batch),
        a(type_of(p.dtype), p.k, p.m, p.a_row, p.a_stride, p.batch),
        c(CUDA_R_32F, p.n, p.m, p.n, p.c_stride, p.batch) {
    OCTAVO_BLAS(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t turn = p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    OCTAVO_BLAS(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &turn,
                                               sizeof(turn)));
  }
  ~Prepared() {
    if (operation != nullptr) static_cast<void>(cublasLtMatmulDescDestroy(operation));
  }
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  void choose_algorithm(cublasLtHandle_t handle) {
    cublasLtMatmulPreference_t preference = nullptr;
    OCTAVO_BLAS(cublasLtMatmulPreferenceCreate(&preference));
    const std::size_t scratch = Matmul::kScratchBytes;
    cublasLtMatmulHeuristicResult_t result = {};
    int found = 0;
    cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &scratch, sizeof(scratch));
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatmulAlgoGetHeuristic(handle, operation, b.get(), a.get(), c.get(), c.get(),
                                              preference, 1, &result, &found);
    }
    static_cast<void>(cublasLtMatmulPreferenceDestroy(preference));
    check_blas(status, "cublasLtMatmulAlgoGetHeuristic");
    check_blas(found > 0 ? result.state : CUBLAS_STATUS_NOT_SUPPORTED,
               "cublasLtMatmulAlgoGetHeuristic");
    algorithm = result.algo;
  }

  Product product;
  cublasLtMatmulDesc_t operation = nullptr;
  Layout b, a, c;
  cublasLtMatmulAlgo_t algorithm = {};
};

}  // namespace

struct Matmul::State {
  cublasLtHandle_t handle = nullptr;
  std::vector<std::unique_ptr<Prepared>> prepared;
  std::size_t oldest = 0;

  State() { OCTAVO_BLAS(cublasLtCreate(&handle)); }
  ~State() { static_cast<void>(cublasLtDestroy(handle)); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const Prepared& get(const Product& product) {
    for (const auto& known : prepared) {
      if (known->product == product) return *known;
    }
    auto made = std::make_unique<Prepared>(product);
    made->choose_algorithm(handle);
    if (prepared.size() < kMostPrepared) {
      prepared.push_back(std::move(made));
      return *prepared.back();
    }
    const std::size_t place = oldest;
    oldest = (oldest + 1) % kMostPrepared;
    prepared[place] = std::move(made);
    return *prepared[place];
  }
};

Matmul::Matmul() : state_(std::make_unique<State>()) {}
Matmul::~Matmul() = default;

void Matmul::run(const Product& product, float alpha, const void* a, const void* b, float* c,
                 void* scratch, CUstream_st* stream) {
  const Prepared& p = state_->get(product);
  const float beta = 0.0F;
  OCTAVO_BLAS(cublasLtMatmul(state_->handle, p.operation, &alpha, b, p.b.get(), a, p.a.get(), &beta,
                             c, p.c.get(), c, p.c.get(), &p.algorithm, scratch, kScratchBytes,
                             stream));
}

}  // namespace octavo::kernels::cuda
