// SPDX-License-Identifier: Apache-2.0
// Matrix products on a GPU by cuBLASLt.
#pragma once

#include <cstdint>
#include <memory>

#include "examples/generate/matrix.h"

namespace generate::gpu {

/// Throws octavo::Error DeviceFailure, naming the call, unless `code` (a cudaError_t) is success;
/// OutOfMemory for want of memory.
void check(int code, const char* call);

/// Memory of a GPU. Not cleared; grows, losing what it holds.
class Memory {
 public:
  Memory() = default;
  explicit Memory(std::size_t num_bytes) { fit(num_bytes); }
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;

  void fit(std::size_t num_bytes);
  void upload(const void* from, std::size_t num_bytes);
  [[nodiscard]] void* get() const { return data_; }
  [[nodiscard]] float* floats() const { return static_cast<float*>(data_); }
  [[nodiscard]] const std::int32_t* ints() const { return static_cast<const std::int32_t*>(data_); }

 private:
  void* data_ = nullptr;
  std::size_t num_bytes_ = 0;
};

/// A matrix [rows, columns] of weights.
struct GpuMatrix {
  Memory memory;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

class Products {
 public:
  Products();
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  /// y[i] = matrix * x[i], or y[i] += it: x [count, columns] in the weights' type, y floats.
  void multiply(const GpuMatrix& matrix, WeightType type, const void* x, std::int64_t count,
                float* y, bool adds);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace generate::gpu
