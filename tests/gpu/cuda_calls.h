// SPDX-License-Identifier: Apache-2.0
// Counts the calls of the CUDA runtime that take memory, give it back, or wait. The linker puts the
// counters (cuda_calls.cpp) before the runtime's functions for all of the library's own objects;
// what cuBLASLt and cuDNN call by themselves is not seen here but under stream capture, which
// forbids it.
#pragma once

namespace octavo::gpu_tests {

struct CudaCalls {
  int memory = 0;  ///< cudaMalloc, cudaFree and their kin.
  int waits = 0;   ///< cudaStreamSynchronize, cudaDeviceSynchronize, cudaMemcpy and their kin.
  int launches_of_graphs = 0;
  int events = 0;  ///< cudaEventRecord and cudaEventQuery.
};

/// Since the program began.
CudaCalls cuda_calls();

}  // namespace octavo::gpu_tests
