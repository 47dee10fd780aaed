// SPDX-License-Identifier: Apache-2.0
// Decode and drafts, heads of up to 64 dims.
#include "kernels/cuda/flash2/attend_launch.cuh"

namespace octavo::kernels::flash2 {

int attend_few_64(const Work& work, const Frequencies& frequencies, CUstream_st* stream) {
  if (work.tile_rows == Few64<1>::kRows)
    return launch_instance<Few64<1>>(work, frequencies, stream);
  return launch_instance<Few64<2>>(work, frequencies, stream);
}

}  // namespace octavo::kernels::flash2
