// SPDX-License-Identifier: Apache-2.0
// The same where a block may have 163 KB of shared memory.
#include "kernels/cuda/flash2/attend_launch.cuh"

namespace octavo::kernels::flash2 {

int attend_wide_medium(const Work& work, const Frequencies& frequencies, CUstream_st* stream) {
  return launch_instance<WideMedium>(work, frequencies, stream);
}

}  // namespace octavo::kernels::flash2
