// SPDX-License-Identifier: Apache-2.0
// This family's instances of the common gather.
#include "kernels/cuda/unfused/gather.h"

#include "kernels/cuda/common/gather.cuh"

namespace octavo::kernels::cuda {

int gather_keys(const GatherParams& params, CUstream_st* stream) {
  return launch_gather(params, stream);
}

}  // namespace octavo::kernels::cuda
