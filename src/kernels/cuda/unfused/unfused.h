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

/// Holds what cuBLASLt prepared. For one device, one thread at a time.
class Unfused {
 public:
  Unfused();
  ~Unfused();
  Unfused(const Unfused&) = delete;
  Unfused& operator=(const Unfused&) = delete;

  /// Products are in the cache's dtype where q has it too, else in F32. `params` points to device
  /// memory, `host` to the same lengths in the host's. Throws DeviceFailure.
  void attend(const AttendParams& params, const StepBatch& host, void* workspace,
              std::size_t workspace_bytes, CUstream_st* stream);

 private:
  std::unique_ptr<Matmul> matmul_;
};

}  // namespace octavo::kernels::cuda
