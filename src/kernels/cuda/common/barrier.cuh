// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory (mbarrier, sm80): to arrive and to wait are two things, and copies
// arrive by themselves. A barrier's phases have parities 0, 1, 0 …
#pragma once

#include <cstdint>

#include "kernels/cuda/common/tensor_core.cuh"

namespace octavo::kernels::cuda {

/// Makes a barrier whose phases end after `arrivals` each. By one thread; the others may use it
/// behind a barrier of the block.
__device__ inline void init_barrier(SmemAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void arrive(SmemAddress barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared.b64 state, [%0];\n"
      "}\n" ::"r"(barrier)
      : "memory");
}

/// The thread arrives, without waiting, once all copies that it has asked for are there.
__device__ inline void arrive_behind_copies(SmemAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}

/// Waits until the newest phase of this parity is over; of a new barrier those of parity 1 are.
__device__ inline void wait_barrier(SmemAddress barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
#define OCTAVO_TRY_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define OCTAVO_TRY_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "again:\n" OCTAVO_TRY_WAIT
      " over, [%0], %1;\n"
      "@!over bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#undef OCTAVO_TRY_WAIT
}

}  // namespace octavo::kernels::cuda
