// SPDX-License-Identifier: Apache-2.0
// Heads of up to 576 dims of K and 512 of V.
#include "kernels/cuda/flash2/attend_launch.cuh"

namespace octavo::kernels::flash2 {

int attend_wide(const Work& work, const Frequencies& frequencies, CUstream_st* stream) {
  return launch_instance<Wide>(work, frequencies, stream);
}

}  // namespace octavo::kernels::flash2
