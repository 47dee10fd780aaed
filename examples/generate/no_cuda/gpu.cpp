// SPDX-License-Identifier: Apache-2.0
#include "examples/generate/gpu.h"

#include <octavo/error.h>

namespace generate {

std::unique_ptr<GpuModel> make_gpu_model(const Weights& /*weights*/, octavo::Device /*device*/) {
  throw octavo::Error(octavo::ErrorCode::NotCompiled,
                      "--device: wanted cpu, got cuda (this build has no CUDA part)");
}

}  // namespace generate
