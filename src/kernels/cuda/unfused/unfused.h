// SPDX-License-Identifier: Apache-2.0
// The definition on the GPU: gather, product, softmax, product.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::cuda {

class Matmul;

/// Bytes of workspace under which a call with sequences of up to `kv_len` tokens is refused.
std::size_t least_unfused_bytes(std::int32_t group, std::int32_t head_dim, std::int32_t head_dim_v,
                                std::int64_t kv_len);

/// Bytes with which the call is cut no further than its lengths ask for.
std::size_t whole_unfused_bytes(const AttendParams& params, const StepLengths& lengths);

/// Holds what cuBLASLt prepared. For one device, one thread at a time.
class Unfused {
 public:
  Unfused();
  ~Unfused();
  Unfused(const Unfused&) = delete;
  Unfused& operator=(const Unfused&) = delete;

  /// Products are in the cache's dtype where q has it too, else in F32. `params` points to device
  /// memory; `lengths` are the same as far as the host knows them. Throws DeviceFailure.
  void attend(const AttendParams& params, const StepLengths& lengths, void* workspace,
              std::size_t workspace_bytes, CUstream_st* stream);

 private:
  std::unique_ptr<Matmul> matmul_;
};

}  // namespace octavo::kernels::cuda
