// SPDX-License-Identifier: Apache-2.0
// Heads of up to 128 dims.
#include "kernels/cuda/flash2/attend_launch.cuh"

namespace octavo::kernels::flash2 {

int attend_128(const Work& work, const Frequencies& frequencies, CUstream_st* stream) {
  return launch_instance<Head128>(work, frequencies, stream);
}

}  // namespace octavo::kernels::flash2
