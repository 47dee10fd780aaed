// SPDX-License-Identifier: Apache-2.0
// The tiled attention's kernels over a F16 cache, compiled for each of Highway's targets.

#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attend_f16.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway wants.
#include <hwy/highway.h>

#include "kernels/cpu/attend-inl.h"
#include "kernels/cpu/unit.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
void attend_f16(const Unit& unit) { attend_unit<F16Elements>(unit); }
}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octavo::kernels::cpu {
HWY_EXPORT(attend_f16);
void attend_unit_f16(const Unit& unit) { HWY_DYNAMIC_DISPATCH(attend_f16)(unit); }
}  // namespace octavo::kernels::cpu
#endif
