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

std::size_t FusedCalls::bytes(const kernels::AttendParams& /*params*/,
                              const kernels::StepLengths& /*lengths*/) {
  OCTAVO_CHECK(attention_ != nullptr);
  return 0;
}

void FusedCalls::attend(const kernels::AttendParams& /*params*/,
                        const kernels::StepLengths& /*lengths*/, void* /*workspace*/,
                        std::size_t /*workspace_bytes*/, Stream /*stream*/) {
  OCTAVO_CHECK(attention_ != nullptr);
}

}  // namespace octavo::dispatch
