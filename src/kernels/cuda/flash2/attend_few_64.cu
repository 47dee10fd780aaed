// SPDX-License-Identifier: Apache-2.0
// Decode, heads of up to 64 dims.
#include "kernels/cuda/flash2/attend_launch.cuh"

namespace octavo::kernels::flash2 {

int attend_few_64(const Work& work, const Frequencies& frequencies, CUstream_st* stream) {
  return launch_instance<Few64>(work, frequencies, stream);
}

}  // namespace octavo::kernels::flash2
