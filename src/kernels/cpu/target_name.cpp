// SPDX-License-Identifier: Apache-2.0
// Names the instruction set that dynamic dispatch takes here.

#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/target_name.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway wants.
#include <hwy/highway.h>

#include "kernels/cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
const char* name_of_target() { return hwy::TargetName(HWY_TARGET); }
}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octavo::kernels::cpu {
HWY_EXPORT(name_of_target);
const char* target_name() { return HWY_DYNAMIC_DISPATCH(name_of_target)(); }
}  // namespace octavo::kernels::cpu
#endif
