// SPDX-License-Identifier: Apache-2.0
// Runs what has been validated: picks the backend, makes schedule and workspace, calls the kernels.
#pragma once

#include <octavo/types.h>

#include "device/host_buffer.h"
#include "dispatch/features.h"
#include "kernels/cpu/kernels.h"
#include "kernels/params.h"
#include "plan/step_memory.h"

namespace octavo::dispatch {

/// Attends with the backend named (never Auto). `memory` is the step's, `workspace` the cache's;
/// both grow when something larger than ever is asked of them.
void attend(Backend backend, bool batch_invariant, const kernels::AttendParams& params,
            plan::StepMemory& memory, device::HostBuffer& workspace);

void append(const kernels::AppendParams& params, plan::StepMemory& memory);

void convert(const kernels::ConvertParams& params);
void gather(const kernels::GatherParams& params);

void merge(const kernels::cpu::MergeParams& params);

}  // namespace octavo::dispatch
