// SPDX-License-Identifier: Apache-2.0
// The chooser never picks what this build lacks.
#include "dispatch/fused_calls.h"

#include "base/error.h"

namespace octavo::kernels::fused {
class FusedAttention {};
}  // namespace octavo::kernels::fused

namespace octavo::dispatch {

FusedCalls::FusedCalls(Device device) : device_(device) {}
FusedCalls::~FusedCalls() = default;

void FusedCalls::check(const kernels::AttendParams& /*params*/, const kernels::StepBatch& /*host*/,
                       std::size_t /*workspace_bytes*/) {
  OCTAVO_CHECK(attention_ != nullptr);
}

void FusedCalls::attend(const kernels::AttendParams& /*params*/, const kernels::StepBatch& /*host*/,
                        void* /*workspace*/, std::size_t /*workspace_bytes*/, Stream /*stream*/) {
  OCTAVO_CHECK(attention_ != nullptr);
}

}  // namespace octavo::dispatch
