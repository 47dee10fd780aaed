// SPDX-License-Identifier: Apache-2.0
// The attentions that `fused` is tested with on a GPU.
#pragma once

#include <vector>

#include "kernels_cudnn/gpu/device_problem.h"

namespace octavo::test {

std::vector<Spec> fused_cases();

}  // namespace octavo::test
