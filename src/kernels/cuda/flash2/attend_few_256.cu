// SPDX-License-Identifier: Apache-2.0
// Decode and drafts, heads of up to 256 dims.
#include "kernels/cuda/flash2/attend_launch.cuh"

namespace octavo::kernels::flash2 {

int attend_few_256(const Work& work, const Frequencies& frequencies, CUstream_st* stream) {
  if (work.tile_rows == Few256<1>::kRows)
    return launch_instance<Few256<1>>(work, frequencies, stream);
  return launch_instance<Few256<2>>(work, frequencies, stream);
}

}  // namespace octavo::kernels::flash2
