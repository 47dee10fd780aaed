// SPDX-License-Identifier: Apache-2.0
// Decode, heads of up to 128 dims.
#include "kernels/cuda/flash2/attend_launch.cuh"

namespace octavo::kernels::flash2 {

int attend_few_128(const Work& work, const Frequencies& frequencies, CUstream_st* stream) {
  return launch_instance<Few128>(work, frequencies, stream);
}

}  // namespace octavo::kernels::flash2
