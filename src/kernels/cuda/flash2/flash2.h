// SPDX-License-Identifier: Apache-2.0
// The backend `flash2`: attention over the cache as it lies, by mma.sync. Compiles without CUDA.
//
// A call enqueues up to four kernels: the padding, the cut, the attention, and the combination
// where a sequence may be split. None allocates or waits; lengths are read on the device alone, so
// that a call and a captured graph's replay give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::flash2 {

/// The widest head, of K and of V; dims are multiples of kDimStep.
inline constexpr std::int32_t kWidestHead = 256;
inline constexpr std::int32_t kDimStep = 8;

/// Bytes of workspace that a call within `lengths` takes.
std::size_t workspace_bytes(const AttendParams& params, const StepLengths& lengths);

/// `workspace` is aligned to 256 bytes and holds workspace_bytes. Throws DeviceFailure.
void attend(const AttendParams& params, const StepLengths& lengths, void* workspace,
            CUstream_st* stream);

}  // namespace octavo::kernels::flash2
