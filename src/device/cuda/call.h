// SPDX-License-Identifier: Apache-2.0
// The one way in which calls of the CUDA runtime are made.
#pragma once

#include "device/gpu.h"

/// Throws DeviceFailure, naming the call, when it does not succeed.
#define OCTAVO_CUDA(call) ::octavo::device::check(static_cast<int>(call), #call)
